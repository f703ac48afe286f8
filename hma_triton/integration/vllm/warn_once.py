"""One log line per kind of trouble, however often it happens; the metrics count."""

from __future__ import annotations

from vllm.logger import init_logger

logger = init_logger("vllm.hma_triton")


class WarnOnce:
    """Logs the first warning of every kind."""

    def __init__(self) -> None:
        self._kinds: set[str] = set()

    def __call__(self, kind: str, text: str, *values: object) -> None:
        if kind not in self._kinds:
            self._kinds.add(kind)
            logger.warning("hma_triton: " + text, *values)
