"""Measuring programs for what runs on the host beside the copy: `pytest bench`.

Needs pytest-benchmark. The copy itself is measured by `hma-triton bench copy`.
"""
