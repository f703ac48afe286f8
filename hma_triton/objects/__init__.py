"""Cached objects in host memory: one arena, an index of chunks, eviction, leases."""
