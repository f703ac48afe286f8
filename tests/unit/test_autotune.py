"""The decision logic of tuning, on recorded and on made-up times: no device is needed for it."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from hma_triton.autotune import (
    Measurement,
    Recording,
    candidates,
    decide,
    measure,
    path_candidates,
    read_recording,
    write_recording,
)
from hma_triton.autotune_scratch import ScratchSampler
from hma_triton.cli.tune import app, decide_and_write, scratch_copies
from hma_triton.errors import ConfigError
from hma_triton.kernels.addressing import Direction, ObjectLayout
from hma_triton.tuning import (
    CONFIG_DIRECTORY,
    DEFAULTS_FILE,
    Environment,
    KernelConfig,
    TuneKey,
    TuneTable,
    default_config,
    read_values,
)

ENVIRONMENT = Environment("Recorded GPU", "sm_90", "2.13.0", "3.9.0", "13.0", "abcd")
KEY = TuneKey(131072, 1, 9, 16, "store", 2)
DEFAULT = default_config("sm_90")
FEW = replace(DEFAULT, program_cap=8)
MANY = replace(DEFAULT, program_cap=64)


def times(config: KernelConfig, middle: float, key: TuneKey = KEY) -> Measurement:
    """Five rounds around `middle`, one of them far off: medians do not mind."""
    rounds = (middle, middle * 0.99, middle * 1.01, middle, middle * 40)
    return Measurement(key, 128 << 20, config, rounds)


def chosen(*measurements: Measurement, band: float = 0.03) -> KernelConfig:
    (choice,) = decide(measurements, lambda _: DEFAULT, band)
    return choice.config


def test_the_config_in_use_stays_within_the_band() -> None:
    assert chosen(times(DEFAULT, 100), times(MANY, 98)) == DEFAULT


def test_a_config_beyond_the_band_replaces_it() -> None:
    assert chosen(times(DEFAULT, 100), times(MANY, 96)) == MANY


def test_the_band_is_a_setting() -> None:
    assert chosen(times(DEFAULT, 100), times(MANY, 96), band=0.10) == DEFAULT
    assert chosen(times(DEFAULT, 100), times(MANY, 99), band=0.0) == MANY


def test_fewer_programs_are_preferred_among_the_fast() -> None:
    assert chosen(times(DEFAULT, 100), times(MANY, 50), times(FEW, 51)) == FEW
    assert chosen(times(DEFAULT, 100), times(MANY, 50), times(FEW, 52)) == MANY


def test_the_copy_engine_takes_no_programs_and_wins_a_tie() -> None:
    dma, staged = path_candidates(MANY, ("dma", "staged"))
    assert (dma.path, staged.path) == ("dma", "staged")
    slow = times(DEFAULT, 200)
    assert chosen(slow, times(FEW, 99), times(dma, 100), times(staged, 98)) == dma
    assert chosen(slow, times(FEW, 99), times(dma, 110), times(staged, 98)) == FEW


def test_without_the_config_in_use_the_fast_ones_are_compared() -> None:
    (choice,) = decide([times(MANY, 50), times(FEW, 51)], lambda _: DEFAULT)
    assert choice.config == FEW
    assert choice.incumbent_us is None
    assert choice.reason == "the config in use was not measured"


def test_numbers_of_a_choice() -> None:
    (choice,) = decide([times(DEFAULT, 100), times(MANY, 50)], lambda _: DEFAULT)
    assert (choice.incumbent_us, choice.median_us) == (100, 50)
    assert choice.reason == "2.00 times as fast"
    assert choice.gigabytes_per_second == pytest.approx((128 << 20) / 50e-6 / 1e9)


def test_keys_are_decided_apart() -> None:
    other = replace(KEY, direction="retrieve")
    choices = decide(
        [times(DEFAULT, 100), times(DEFAULT, 90, other), times(MANY, 50, other)],
        lambda _: DEFAULT,
    )
    assert {c.key.direction: c.config for c in choices} == {"store": DEFAULT, "retrieve": MANY}


@pytest.mark.parametrize(
    ("rounds", "complaint"),
    [((1.0,) * 4, "4 rounds"), ((1.0, 1, 1, 1, 0), "shortest 0 us"), ((), "0 rounds")],
)
def test_times_that_say_nothing_are_refused(rounds: tuple[float, ...], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        decide([Measurement(KEY, 1, DEFAULT, rounds)], lambda _: DEFAULT)


def test_a_config_measured_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="measured twice"):
        decide([times(DEFAULT, 1), times(DEFAULT, 2)], lambda _: DEFAULT)


@given(
    middles=st.lists(st.integers(1, 1000), min_size=1, max_size=8),
    band=st.sampled_from((0.0, 0.03, 0.2)),
)
def test_never_slower_than_the_band_allows(middles: list[int], band: float) -> None:
    configs = [replace(DEFAULT, program_cap=1 + i) for i in range(len(middles))]
    measured = [times(c, m) for c, m in zip(configs, middles, strict=True)]
    (choice,) = decide(measured, lambda _: configs[0], band)
    assert choice.median_us <= min(middles) * (1 + band)
    assert (choice.config == configs[0]) == (middles[0] <= min(middles) * (1 + band))


def test_configs_are_measured_in_turns() -> None:
    """Every round has every config once, and each round begins at another one."""
    calls: list[KernelConfig] = []

    def sample(_: TuneKey, config: KernelConfig) -> float:
        calls.append(config)
        return float(len(calls))

    configs = [DEFAULT, FEW, MANY]
    found = list(measure({KEY: 64}, lambda _: [*configs, FEW], sample, rounds=6))
    assert [m.config for m in found] == configs
    assert all(len(m.microseconds) == 6 and m.nbytes == 64 for m in found)
    rounds = [calls[i : i + 3] for i in range(0, len(calls), 3)]
    assert len(rounds) == 7  # the first is not counted
    assert all(Counter(turn) == Counter(configs) for turn in rounds)
    assert [turn[0] for turn in rounds[1:]] == configs * 2
    assert min(t for m in found for t in m.microseconds) == 4


def test_drift_meets_all_configs_alike() -> None:
    """A device that slows down all the while does not make the first config the best."""
    clock = iter(range(100, 100_000))

    def sample(_: TuneKey, config: KernelConfig) -> float:
        return next(clock) * (0.9 if config == MANY else 1.0)

    found = list(measure({KEY: 64}, lambda _: [DEFAULT, FEW, MANY], sample, rounds=15))
    assert chosen(*found) == MANY


def test_too_few_rounds_are_refused() -> None:
    with pytest.raises(ConfigError, match="4 rounds; a median needs at least 5"):
        list(measure({KEY: 64}, lambda _: [DEFAULT], lambda *_: 1.0, rounds=4))


@pytest.mark.parametrize("word_bytes", [16, 8, 4, 2, 1])
@pytest.mark.parametrize("warp", [32, 64])
def test_candidates_hold_one_to_four_words_a_thread(word_bytes: int, warp: int) -> None:
    found = candidates(word_bytes, warp)
    assert len(found) == len(set(found)) >= 24
    assert {c.tile_words // (c.warps * warp) for c in found} <= {1, 2, 4}
    assert max(c.program_cap for c in found) == 64


def recording() -> Recording:
    return Recording(ENVIRONMENT, (times(DEFAULT, 100), times(FEW, 60), times(MANY, 50)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "configs"
    made.mkdir()
    (made / DEFAULTS_FILE).write_text((CONFIG_DIRECTORY / DEFAULTS_FILE).read_text())
    return made


def test_recordings_come_back(tmp_path: Path) -> None:
    path = tmp_path / "recording.json"
    write_recording(recording(), path)
    assert read_recording(path) == recording()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"environment": {}}, "recording.json: Environment needs"),
        ({"measurements": [1]}, r"measurements\[0\]: not an object"),
        ({"extra": 1}, "recording.json: Recording needs"),
        ({"format": 9}, "format is 9"),
    ],
)
def test_broken_recordings_are_named(
    tmp_path: Path, change: dict[str, object], complaint: str
) -> None:
    path = tmp_path / "recording.json"
    path.write_text(json.dumps({"format": 1, **asdict(recording()), **change}))
    with pytest.raises(ConfigError, match=complaint):
        read_recording(path)


def test_times_must_be_numbers(tmp_path: Path) -> None:
    raw = {"format": 1, **asdict(recording())}
    raw["measurements"][1]["microseconds"] = ["fast"]
    path = tmp_path / "recording.json"
    path.write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match=r"measurements\[1\]: microseconds must be"):
        read_recording(path)


def test_a_replay_writes_what_serving_reads(tmp_path: Path, folder: Path) -> None:
    """The whole way: recording, decision, file, lookup; a second replay changes nothing."""
    path = tmp_path / "recording.json"
    write_recording(recording(), path)
    arguments = ["--replay", str(path), "--directory", str(folder)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    file = folder / ENVIRONMENT.file_name
    (value,) = read_values(file)
    assert value.config == MANY
    assert value.median_us == 50
    assert TuneTable(ENVIRONMENT, folder).lookup(KEY) == MANY
    before = file.read_bytes()
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert file.read_bytes() == before


def test_hysteresis_is_against_what_is_in_use(folder: Path) -> None:
    """After a change the new config is the one to beat: near equals do not swap back and forth."""
    decide_and_write(recording(), folder, 0.03, write=True)
    again = Recording(ENVIRONMENT, (times(DEFAULT, 50), times(FEW, 50), times(MANY, 51)))
    (choice,), _ = decide_and_write(again, folder, 0.03, write=True)
    assert choice.config == choice.incumbent == MANY


def test_a_dry_run_writes_nothing(tmp_path: Path, folder: Path) -> None:
    path = tmp_path / "recording.json"
    write_recording(recording(), path)
    done = CliRunner().invoke(app, ["--replay", str(path), "--directory", str(folder), "--dry-run"])
    assert done.exit_code == 0
    assert "nothing written" in done.output
    assert [file.name for file in folder.iterdir()] == [DEFAULTS_FILE]


def test_without_a_device_tuning_is_refused() -> None:
    """One clear line; `hma-triton` turns it into exit status 2."""
    if torch.cuda.is_available():
        return
    done = CliRunner().invoke(app, [])
    assert isinstance(done.exception, ConfigError)
    assert "\n" not in str(done.exception)
    assert "tuning needs a GPU" in str(done.exception)
    with pytest.raises(ConfigError, match="cpu is none"):
        ScratchSampler(torch.device("cpu"), {})


def test_what_is_timed_for_a_model() -> None:
    """Both directions of every group, once for each size bucket; scratch pools hold the copy."""
    copies = scratch_copies("gemma-3-27b-it", "main", ObjectLayout.OPAQUE, (1 << 19, 8 << 20))
    assert {key.direction for key in copies} == {"store", "retrieve"}
    assert {key.size_bucket for key in copies} == {0, 1}
    for key, copy in copies.items():
        spec = copy.spec
        assert copy.direction is Direction[key.direction.upper()]
        assert copy.num_blocks == spec.num_blocks
        last = max(spec.row_addresses) + (spec.num_blocks - 1) * spec.block_stride_bytes
        assert last + spec.pool_extent_bytes <= copy.pool_bytes
        spans = sorted(
            (row + block * spec.block_stride_bytes, spec.pool_extent_bytes)
            for row in spec.row_addresses
            for block in range(spec.num_blocks)
        )
        for (at, length), (following, _) in pairwise(spans):
            assert at + length <= following
