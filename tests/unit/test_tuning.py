"""Launch configs: written defaults, tuned files, and what a file of elsewhere is worth."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import replace
from pathlib import Path

import pytest

from hma_triton.errors import ConfigError
from hma_triton.tuning import (
    CONFIG_DIRECTORY,
    DEFAULTS_FILE,
    Environment,
    KernelConfig,
    TunedValue,
    TuneKey,
    TuneTable,
    default_config,
    load_defaults,
    read_values,
    size_bucket,
    source_hash,
    write_values,
)

HERE = Environment("Some GPU 80GB", "sm_90", "2.13.0", "3.9.0", "13.0", "abcd")
THERE = replace(HERE, triton="3.8.0")
KEY = TuneKey(131072, 1, 9, 16, "store", 1)
OTHER_KEY = replace(KEY, direction="retrieve")
CONFIG = KernelConfig(512, 4, 2, 16)


def value(key: TuneKey = KEY, environment: Environment = HERE) -> TunedValue:
    return TunedValue(key, CONFIG, environment, 12.5, 50.0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of configs with the written defaults."""
    (tmp_path / DEFAULTS_FILE).write_text((CONFIG_DIRECTORY / DEFAULTS_FILE).read_text())
    return tmp_path


def test_every_architecture_has_a_default_within_reason() -> None:
    """16 to 64 bytes a thread in 16-byte words, a capped grid, one path that always works."""
    table = load_defaults()
    assert {"sm_80", "sm_90", "sm_100", "gfx942", "interpreter", "other"} <= set(table)
    for name, config in table.items():
        if name != "interpreter":
            threads = config.warps * (64 if name.startswith("gfx") else 32)
            assert 16 <= config.tile_words * 16 // threads <= 64
        assert 1 <= config.program_cap <= 64
        assert config.path == "zero_copy"
    assert default_config("sm_999") == table["other"]


def test_shipped_files_can_all_be_read() -> None:
    for path in CONFIG_DIRECTORY.glob("*.json"):
        if path.name != DEFAULTS_FILE:
            assert {entry.environment.file_name for entry in read_values(path)} == {path.name}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"tile_words": 768}, "tile_words is 768"),
        ({"warps": 0}, "warps is 0"),
        ({"stages": 0}, "stages is 0"),
        ({"program_cap": 0}, "program_cap is 0"),
        ({"program_cap": "8"}, "program_cap is '8'"),
        ({"path": "magic"}, "path is 'magic'; use one of zero_copy, staged, dma"),
    ],
)
def test_bad_configs_are_refused(change: dict[str, object], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        replace(CONFIG, **change)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("nbytes", "bucket"),
    [(1, 0), (1 << 20, 0), ((1 << 20) + 1, 1), (16 << 20, 1), (256 << 20, 2), (257 << 20, 3)],
)
def test_size_buckets(nbytes: int, bucket: int) -> None:
    assert size_bucket(nbytes) == bucket


def test_a_written_value_is_found_again(folder: Path) -> None:
    path = write_values([value()], HERE, folder)
    assert read_values(path) == (value(),)
    table = TuneTable(HERE, folder)
    assert table.lookup(KEY) == CONFIG
    assert table.measured(KEY) == CONFIG
    assert table.measured(OTHER_KEY) is None


def test_the_environment_stands_beside_every_value(folder: Path) -> None:
    path = write_values([value(), value(OTHER_KEY)], HERE, folder)
    stored = json.loads(path.read_text())["values"]
    assert [entry["environment"]["triton"] for entry in stored] == ["3.9.0", "3.9.0"]
    assert [entry["environment"]["kernel_source"] for entry in stored] == ["abcd", "abcd"]


def test_values_of_one_environment_are_merged(folder: Path) -> None:
    write_values([value()], HERE, folder)
    newer = replace(value(), config=replace(CONFIG, program_cap=8))
    path = write_values([newer, value(OTHER_KEY)], HERE, folder)
    assert set(read_values(path)) == {newer, value(OTHER_KEY)}
    assert [file.name for file in folder.iterdir() if "tmp" in file.name] == []


@pytest.mark.parametrize(
    "change",
    [
        {"device": "Other GPU"},
        {"torch": "2.14.0"},
        {"triton": "3.8.0"},
        {"driver": "12.9"},
        {"kernel_source": "ef01"},
        {"architecture": "sm_100"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_environment_is_a_miss(
    folder: Path, change: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    """Any difference; logged once, however often it is asked."""
    write_values([value()], HERE, folder)
    elsewhere = replace(HERE, **change)
    assert elsewhere.file_name != HERE.file_name
    table = TuneTable(elsewhere, folder)
    with caplog.at_level(logging.INFO, logger="hma_triton.tuning"):
        answers = {table.lookup(KEY) for _ in range(3)} | {table.lookup(OTHER_KEY)}
    assert answers == {default_config(elsewhere.architecture)}
    assert len(caplog.records) == 1
    assert elsewhere.device in caplog.text


def test_a_missing_key_is_logged_once_beside_others(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_values([value()], HERE, folder)
    write_values([value(OTHER_KEY, THERE)], THERE, folder)
    table = TuneTable(HERE, folder)
    with caplog.at_level(logging.INFO, logger="hma_triton.tuning"):
        for _ in range(3):
            assert table.lookup(OTHER_KEY) == default_config("sm_90")
    assert len(caplog.records) == 1
    assert f"measured elsewhere, see {THERE.file_name}" in caplog.text


def test_files_of_other_environments_are_never_overwritten(folder: Path) -> None:
    """Not even when a file was renamed to the name that this environment would write."""
    theirs = write_values([value(environment=THERE)], THERE, folder)
    before = theirs.read_bytes()
    write_values([value()], HERE, folder)
    assert theirs.read_bytes() == before
    renamed = folder / HERE.file_name
    os.replace(theirs, renamed)
    with pytest.raises(ConfigError, match="left as it is"):
        write_values([value()], HERE, folder)
    assert renamed.read_bytes() == before


def test_a_value_of_elsewhere_is_not_written(folder: Path) -> None:
    with pytest.raises(ConfigError, match="left as it is"):
        write_values([value(environment=THERE)], HERE, folder)
    assert not (folder / HERE.file_name).exists()


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "format is 'list'"),
        ('{"format": 2}', "format is 2, this version reads 1"),
        ('{"format": 1, "values": [3]}', r"values\[0\]: not an object"),
        ('{"format": 1, "values": [{"key": {}}]}', r"values\[0\]: TuneKey needs"),
    ],
)
def test_broken_files_are_named_and_ignored(
    folder: Path, content: str, complaint: str, caplog: pytest.LogCaptureFixture
) -> None:
    broken = folder / "broken.json"
    broken.write_text(content)
    with pytest.raises(ConfigError, match=f"broken.json: .*{complaint}|{complaint}"):
        read_values(broken)
    table = TuneTable(HERE, folder)
    assert "broken.json" in caplog.text
    assert table.lookup(KEY) == default_config("sm_90")


def test_defaults_need_a_fallback(tmp_path: Path) -> None:
    (tmp_path / DEFAULTS_FILE).write_text('{"format": 1, "architectures": {}}')
    with pytest.raises(ConfigError, match="no entry 'other'"):
        load_defaults(tmp_path)


def test_source_hash_follows_the_sources(tmp_path: Path) -> None:
    one, two = tmp_path / "a.py", tmp_path / "b.py"
    one.write_text("x = 1\n")
    two.write_text("y = 1\n")
    before = source_hash([one, two])
    assert source_hash([two, one]) == before
    two.write_text("y = 2\n")
    assert source_hash([one, two]) != before
