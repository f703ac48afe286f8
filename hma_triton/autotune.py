"""Offline search for launch configs: measure in turns, decide on medians, keep what is good enough.

Nothing here runs while serving. A recording of measurements can be decided again anywhere, so the
decision needs no device.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from hma_triton.errors import ConfigError
from hma_triton.tuning import (
    FILE_FORMAT,
    Environment,
    KernelConfig,
    TunedValue,
    TuneKey,
    build,
    read_json,
)

MIN_ROUNDS = 5
# a challenger must be this much faster than what is in use
BAND = 0.03
# bytes of a tile that one thread holds: less starves the link, more spills
THREAD_BYTES = (16, 64)
_TILE_WORDS = (256, 512, 1024, 2048)
_WARPS = (4, 8)
_STAGES = (1, 2)
_PROGRAM_CAPS = (8, 16, 32, 64)

Sample = Callable[[TuneKey, KernelConfig], float]


@dataclass(frozen=True, slots=True)
class Measurement:
    """Microseconds of one config on one copy, one value for each round."""

    key: TuneKey
    nbytes: int
    config: KernelConfig
    microseconds: tuple[float, ...]

    @property
    def median_us(self) -> float:
        """Median over the rounds."""
        return median(self.microseconds)


@dataclass(frozen=True, slots=True)
class Recording:
    """Measurements of one environment."""

    environment: Environment
    measurements: tuple[Measurement, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """What was decided for one key, and against what."""

    key: TuneKey
    nbytes: int
    incumbent: KernelConfig
    incumbent_us: float | None
    config: KernelConfig
    median_us: float
    reason: str

    @property
    def gigabytes_per_second(self) -> float:
        """Payload over the median."""
        return self.nbytes / self.median_us / 1e3

    def tuned_value(self, environment: Environment) -> TunedValue:
        """The choice as a config file holds it."""
        return TunedValue(
            key=self.key,
            config=self.config,
            environment=environment,
            median_us=round(self.median_us, 3),
            gigabytes_per_second=round(self.gigabytes_per_second, 3),
        )


def candidates(word_bytes: int, threads_per_warp: int = 32) -> tuple[KernelConfig, ...]:
    """Configs worth measuring for accesses of `word_bytes`: 16 to 64 bytes a thread.

    Words under 16 bytes are held to the same number of accesses a thread as 16-byte words are.
    """
    low, high = (limit // 16 * word_bytes for limit in THREAD_BYTES)
    return tuple(
        KernelConfig(tile_words, warps, stages, program_cap)
        for tile_words in _TILE_WORDS
        for warps in _WARPS
        if low <= tile_words * word_bytes // (threads_per_warp * warps) <= high
        for stages in _STAGES
        for program_cap in _PROGRAM_CAPS
    )


def path_candidates(config: KernelConfig, paths: Iterable[str]) -> tuple[KernelConfig, ...]:
    """`config` by each of `paths`: what is measured against the kernel reaching over the link."""
    return tuple(replace(config, path=path) for path in paths)


def measure(
    nbytes_of: Mapping[TuneKey, int],
    configs_of: Callable[[TuneKey], Sequence[KernelConfig]],
    sample: Sample,
    rounds: int,
) -> Iterator[Measurement]:
    """Measure every config of every key, in turns, so that drift meets all of them alike.

    Each round runs all configs once and starts at another one. One round before the first warms
    up and is not counted.

    Raises:
        ConfigError: fewer than 5 rounds.
    """
    if rounds < MIN_ROUNDS:
        raise ConfigError(f"{rounds} rounds; a median needs at least {MIN_ROUNDS}")
    for key, nbytes in nbytes_of.items():
        configs = list(dict.fromkeys(configs_of(key)))
        seen: dict[KernelConfig, list[float]] = {config: [] for config in configs}
        for config in configs:
            sample(key, config)
        for number in range(rounds):
            turn = number % len(configs)
            for config in configs[turn:] + configs[:turn]:
                seen[config].append(sample(key, config))
        for config, microseconds in seen.items():
            yield Measurement(key, nbytes, config, tuple(microseconds))


def decide(
    measurements: Iterable[Measurement],
    incumbent_of: Callable[[TuneKey], KernelConfig],
    band: float = BAND,
) -> list[Choice]:
    """One choice for each key.

    The incumbent stays unless the fastest config beats it by more than `band`. Then, of all
    configs within `band` of the fastest, the one with the fewest programs is taken: what the copy
    does not take, the model has.

    Raises:
        ConfigError: fewer than 5 rounds, a time that is not above zero, or two measurements of
            one config.
    """
    by_key: dict[TuneKey, dict[KernelConfig, Measurement]] = {}
    for measurement in measurements:
        _check(measurement)
        of_key = by_key.setdefault(measurement.key, {})
        if measurement.config in of_key:
            raise ConfigError(f"{measurement.config} was measured twice for {measurement.key}")
        of_key[measurement.config] = measurement
    return [_decide_key(key, of_key, incumbent_of(key), band) for key, of_key in by_key.items()]


def _check(measurement: Measurement) -> None:
    times = measurement.microseconds
    if len(times) < MIN_ROUNDS or min(times) <= 0:
        raise ConfigError(
            f"{measurement.key} with {measurement.config}: {len(times)} rounds, shortest "
            f"{min(times, default=0)} us; at least {MIN_ROUNDS} above zero are needed"
        )


def _decide_key(
    key: TuneKey,
    measured: Mapping[KernelConfig, Measurement],
    incumbent: KernelConfig,
    band: float,
) -> Choice:
    best = min(measured.values(), key=lambda m: m.median_us)
    current = measured.get(incumbent)
    chosen = current
    reason = "within the band of the fastest"
    if current is None or current.median_us > best.median_us * (1 + band):
        good = [m for m in measured.values() if m.median_us <= best.median_us * (1 + band)]
        chosen = min(good, key=lambda m: (_programs(m.config), m.median_us))
        reason = "the config in use was not measured"
        if current is not None:
            reason = f"{current.median_us / chosen.median_us:.2f} times as fast"
    assert chosen is not None
    return Choice(
        key=key,
        nbytes=chosen.nbytes,
        incumbent=incumbent,
        incumbent_us=current.median_us if current else None,
        config=chosen.config,
        median_us=chosen.median_us,
        reason=reason,
    )


def _programs(config: KernelConfig) -> int:
    """Programs that a copy takes from the model at most; the copy engine takes none."""
    return 0 if config.path == "dma" else config.program_cap


def write_recording(recording: Recording, path: Path) -> None:
    """Measurements as JSON, to be decided again by `read_recording` and `decide`."""
    raw: dict[str, Any] = {"format": FILE_FORMAT, **asdict(recording)}
    path.write_text(json.dumps(raw, indent=1) + "\n", encoding="utf-8")


def read_recording(path: Path) -> Recording:
    """A recording from its file.

    Raises:
        ConfigError: a file that cannot be read or has other fields.
    """
    raw = dict(read_json(path))
    raw.pop("format")
    raw["environment"] = build(Environment, raw.get("environment"), path.name)
    raw["measurements"] = tuple(
        _measurement(item, f"{path.name}: measurements[{index}]")
        for index, item in enumerate(raw.get("measurements", ()))
    )
    recording: Recording = build(Recording, raw, path.name)
    return recording


def _measurement(raw: Any, where: str) -> Measurement:
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{where}: not an object")
    fields = dict(raw)
    fields["key"] = build(TuneKey, fields.get("key"), where)
    fields["config"] = build(KernelConfig, fields.get("config"), where)
    times = fields.get("microseconds")
    if not isinstance(times, list) or not all(isinstance(t, int | float) for t in times):
        raise ConfigError(f"{where}: microseconds must be a list of numbers, found {times!r}")
    fields["microseconds"] = tuple(times)
    measurement: Measurement = build(Measurement, fields, where)
    return measurement
