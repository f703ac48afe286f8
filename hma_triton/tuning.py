"""Which launch a copy takes: written defaults, and the files that `hma-triton tune` fills.

A value is looked up by a `TuneKey`; beside every value stands the environment it was measured in.
Serving only ever reads: a key that is absent, or that was measured elsewhere, takes the default
of the device's architecture and is logged once.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from hma_triton.errors import ConfigError

logger = logging.getLogger(__name__)

CONFIG_DIRECTORY = Path(__file__).parent / "autotune_configs"
DEFAULTS_FILE = "defaults.json"
FILE_FORMAT = 1
PATHS = ("zero_copy", "staged", "dma")
# bytes of one launch, upper edges; a larger launch is in the last bucket
SIZE_BUCKETS_BYTES = (1 << 20, 16 << 20, 256 << 20)


@dataclass(frozen=True, slots=True)
class KernelConfig:
    """How one copy is launched.

    Args:
        tile_words: words (accesses of the specialisation's width) a program moves at a time.
        warps: warps of a program.
        stages: depth of the software pipeline over tiles; 1 is none.
        program_cap: most programs of a launch, so that the copy does not starve the model.
        path: `zero_copy`, `staged` or `dma`.

    Raises:
        ConfigError: a value the kernel cannot take.
    """

    tile_words: int
    warps: int
    stages: int
    program_cap: int
    path: str = "zero_copy"

    def __post_init__(self) -> None:
        for name in ("tile_words", "warps"):
            value = getattr(self, name)
            if not _is_power_of_two(value):
                raise ConfigError(f"KernelConfig.{name} is {value!r}; it must be a power of two")
        for name in ("stages", "program_cap"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"KernelConfig.{name} is {value!r}; it must be at least 1")
        if self.path not in PATHS:
            raise ConfigError(f"KernelConfig.path is {self.path!r}; use one of {', '.join(PATHS)}")


@dataclass(frozen=True, slots=True)
class TuneKey:
    """What a tuned value is for: the copy in bytes, its direction and its size.

    The environment (device, versions, kernel source) is `Environment`; both must agree.
    """

    run_bytes: int
    runs_per_page: int
    rows: int
    word_bytes: int
    direction: str
    size_bucket: int


@dataclass(frozen=True, slots=True)
class Environment:
    """Where a value was measured; any difference makes it a miss."""

    device: str
    architecture: str
    torch: str
    triton: str
    driver: str
    kernel_source: str

    @property
    def file_name(self) -> str:
        """One file per environment, so that no run can overwrite another's values."""
        slug = re.sub(r"[^a-z0-9]+", "-", self.device.lower()).strip("-")
        digest = hashlib.sha256(repr(self).encode()).hexdigest()[:12]
        return f"{slug}-{digest}.json"


@dataclass(frozen=True, slots=True)
class TunedValue:
    """One measured choice."""

    key: TuneKey
    config: KernelConfig
    environment: Environment
    median_us: float
    gigabytes_per_second: float


def _is_power_of_two(value: object) -> bool:
    return isinstance(value, int) and value > 0 and value & (value - 1) == 0


def size_bucket(nbytes: int) -> int:
    """Index of the bucket a launch of `nbytes` falls into."""
    return sum(nbytes > edge for edge in SIZE_BUCKETS_BYTES)


def source_hash(paths: Iterable[Path]) -> str:
    """Digest of kernel sources; a changed kernel turns its old values into misses."""
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def build(kind: Any, raw: Any, where: str) -> Any:
    """A dataclass from a JSON object that has exactly its fields.

    Raises:
        ConfigError: not an object, or unknown or missing fields.
    """
    names = {field.name for field in fields(kind)}
    if not isinstance(raw, Mapping) or set(raw) != names:
        found = sorted(raw) if isinstance(raw, Mapping) else type(raw).__name__
        raise ConfigError(f"{where}: {kind.__name__} needs {sorted(names)}, found {found}")
    return kind(**raw)


def read_json(path: Path) -> Mapping[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path.name}: cannot be read as JSON: {error}") from error
    if not isinstance(raw, Mapping) or raw.get("format") != FILE_FORMAT:
        found = raw.get("format") if isinstance(raw, Mapping) else type(raw).__name__
        raise ConfigError(f"{path.name}: format is {found!r}, this version reads {FILE_FORMAT}")
    return raw


@lru_cache(maxsize=8)
def load_defaults(directory: Path = CONFIG_DIRECTORY) -> Mapping[str, KernelConfig]:
    """Written defaults by architecture (`sm_90`, `gfx942`, ...); `other` is always there.

    Raises:
        ConfigError: a file that is absent or malformed.
    """
    raw = read_json(directory / DEFAULTS_FILE)
    table = {
        name: build(KernelConfig, value["config"], f"{DEFAULTS_FILE}: {name}")
        for name, value in raw["architectures"].items()
    }
    if "other" not in table:
        raise ConfigError(f"{DEFAULTS_FILE}: no entry 'other' for unknown architectures")
    return table


def default_config(architecture: str, directory: Path = CONFIG_DIRECTORY) -> KernelConfig:
    """The written default of `architecture`, else that of `other`."""
    table = load_defaults(directory)
    return table.get(architecture, table["other"])


def read_values(path: Path) -> tuple[TunedValue, ...]:
    """Every value of one file.

    Raises:
        ConfigError: a malformed file.
    """
    values = []
    for index, raw in enumerate(read_json(path).get("values", ())):
        where = f"{path.name}: values[{index}]"
        if not isinstance(raw, Mapping):
            raise ConfigError(f"{where}: not an object")
        values.append(
            build(
                TunedValue,
                {
                    **raw,
                    "key": build(TuneKey, raw.get("key"), where),
                    "config": build(KernelConfig, raw.get("config"), where),
                    "environment": build(Environment, raw.get("environment"), where),
                },
                where,
            )
        )
    return tuple(values)


def write_values(
    values: Iterable[TunedValue], environment: Environment, directory: Path = CONFIG_DIRECTORY
) -> Path:
    """Merge `values` into the file of `environment`, written aside and renamed.

    Raises:
        ConfigError: a value of another environment, or a file that holds another one's values.
    """
    path = directory / environment.file_name
    standing = read_values(path) if path.exists() else ()
    given = tuple(values)
    for value in (*standing, *given):
        if value.environment != environment:
            raise ConfigError(
                f"{path.name}: holds or was given a value measured on "
                f"{value.environment.device!r} ({value.environment}); it is left as it is, "
                f"this environment is {environment}"
            )
    merged = {value.key: value for value in (*standing, *given)}
    ordered = sorted(merged.values(), key=lambda value: tuple(asdict(value.key).values()))
    text = json.dumps({"format": FILE_FORMAT, "values": [asdict(v) for v in ordered]}, indent=1)
    handle, temporary = tempfile.mkstemp(dir=directory, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text + "\n")
        os.replace(temporary, path)
    except OSError:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path


class TuneTable:
    """Values of one environment, read once; answers every key and never measures.

    Files that cannot be read and values of other environments are misses, logged once each.
    """

    def __init__(self, environment: Environment, directory: Path = CONFIG_DIRECTORY) -> None:
        self.environment = environment
        self._default = default_config(environment.architecture, directory)
        self._logged: set[object] = set()
        self._values: dict[TuneKey, KernelConfig] = {}
        self._elsewhere: dict[TuneKey, str] = {}
        for path in sorted(directory.glob("*.json")):
            if path.name != DEFAULTS_FILE:
                self._read(path)

    def measured(self, key: TuneKey) -> KernelConfig | None:
        """What was measured for `key` in this environment, None without a measurement."""
        return self._values.get(key)

    def lookup(self, key: TuneKey) -> KernelConfig:
        """The measured config of `key`, else the architecture's written default."""
        found = self._values.get(key)
        if found is not None:
            return found
        # one line for a device without any values, one a key otherwise
        subject: object = key if self._values else None
        if subject not in self._logged:
            self._logged.add(subject)
            reason = self._elsewhere.get(key, "not measured")
            logger.info(
                "no tuned launch for %s on %s (%s): written default %s",
                key if self._values else "any copy",
                self.environment.device,
                reason,
                self._default,
            )
        return self._default

    def _read(self, path: Path) -> None:
        try:
            values = read_values(path)
        except ConfigError as error:
            logger.warning("tuned launches ignored: %s", error)
            return
        for value in values:
            if value.environment == self.environment:
                self._values[value.key] = value.config
            else:
                self._elsewhere[value.key] = f"measured elsewhere, see {path.name}"
