"""Transfer engine for the hybrid paged KV caches of serving engines."""
