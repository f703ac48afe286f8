"""The `hma-triton` command."""
