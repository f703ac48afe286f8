"""What a stage of `bench gpu` is given and what it answers."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from hma_triton.cuda_driver import CudaDriver
from hma_triton.errors import ConfigError
from hma_triton.torch_driver import open_driver

_REPEAT_SECONDS = 2.0


@dataclass(slots=True)
class StageReport:
    """A stage's outcome.

    `ok`: None when it only measured; False when something was wrong. `missing` lists what did not
    run and why; `lines` are printed in the table; `data` goes into the JSON.
    """

    ok: bool | None = None
    lines: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)

    def expect(self, right: bool, what: str) -> None:
        """Note a check."""
        self.ok = right if self.ok is None else self.ok and right
        if not right:
            self.lines.append(f"WRONG: {what}")


@dataclass(frozen=True, slots=True)
class StageContext:
    """Where a stage runs and until when (`time.monotonic` seconds, the same in every process).

    `stage`: its name, where it leaves an answer; empty where it is called as a function.
    """

    device_index: int
    deadline: float
    out: str
    stage: str = ""

    @property
    def device(self) -> torch.device:
        """The device under test."""
        return torch.device("cuda", self.device_index)

    @property
    def seconds_left(self) -> float:
        """Until the deadline."""
        return self.deadline - time.monotonic()

    def keep(self, report: StageReport) -> None:
        """Leave what is known so far: it stays when the stage is ended for being late."""
        if self.stage:
            write_answer(answer_path(Path(self.out), self.stage), asdict(report))

    def driver(self) -> CudaDriver:
        """CUDA calls; through torch where the bindings are missing.

        Raises:
            ConfigError: no such device.
        """
        if not torch.cuda.is_available():
            raise ConfigError(f"torch {torch.__version__} finds no GPU here")
        return open_driver(self.device_index)


def answer_path(out: Path, stage: str) -> Path:
    """Where a stage's process leaves its report for the command."""
    return out / f".{stage}.json"


def write_answer(path: Path, answer: dict[str, Any]) -> None:
    """Whole or not at all."""
    aside = path.with_suffix(".new")
    aside.write_text(json.dumps(answer), encoding="utf-8")
    os.replace(aside, path)


def noise(nbytes: int, seed: int) -> torch.Tensor:
    """Bytes that no two seeds share, uint8 `[nbytes]`."""
    generator = torch.Generator().manual_seed(seed)
    block = torch.randint(0, 256, (min(nbytes, 1 << 20) or 1,), generator=generator)
    repeats = -(-nbytes // block.numel())
    return block.to(torch.uint8).repeat(repeats)[:nbytes].contiguous()


def median_seconds(run: Callable[[], None], repeats: int) -> float:
    """Median wall time of `run`, which returns when its work is done; the first call warms up.

    Fewer repeats, one at least, when they take more than a few seconds.
    """
    run()
    times: list[float] = []
    while len(times) < repeats and (not times or sum(times) < _REPEAT_SECONDS):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return statistics.median(times)
