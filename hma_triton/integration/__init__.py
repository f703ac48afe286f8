"""Bindings to serving engines and caches; only these packages read their fields."""
