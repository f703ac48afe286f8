"""The cache server: one thread that answers, a pool of threads that copy."""
