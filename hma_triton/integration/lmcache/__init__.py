"""LMCache: our transfer operations behind its `device_ops`."""
