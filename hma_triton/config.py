"""The server's settings, checked once, and where its socket lives."""

from __future__ import annotations

import ipaddress
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from hma_triton.errors import ConfigError

VERIFY_MODES = ("off", "sample", "all")
# when the host memory is taken: before the socket answers, beside serving, or as objects come
TOUCH_MODES = ("start", "background", "off")
# whether the host memory is pinned for GPUs: where there is one, in any case, or never
PIN_MODES = ("auto", "on", "off")
SAMPLE_EVERY = 16
_GIB = 1 << 30
_MAX_SOCKET_PATH = 107


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """All settings of a cache server. Times are in seconds, sizes in bytes.

    Raises:
        ConfigError: a setting out of its range; names it, the value and the range.
    """

    url: str
    host_bytes: int = 4 * _GIB
    separate_object_groups: bool = True
    object_layout: str = "opaque"
    verify: str = "off"
    copy_threads: int = 2
    copier_threads: int | None = None
    backend: str = "auto"
    max_registrations: int = 64
    max_peers: int = 1024
    queue_limit: int = 64
    lease_s: float = 60.0
    pin_share: float = 0.5
    shutdown_s: float = 5.0
    metrics_port: int | None = None
    parent_pid: int | None = None
    curve_key_file: str | None = None
    hugepages: str = "off"
    numa_node: int | None = None
    touch: str = "background"
    pin: str = "auto"
    # programs of a copy kernel on a GPU; None leaves it to the tuned or written launch
    program_cap: int | None = None
    socket_limit_bytes: int = _GIB

    def __post_init__(self) -> None:
        if self.verify not in VERIFY_MODES:
            raise ConfigError(f"verify {self.verify!r} is unknown; use one of {VERIFY_MODES}")
        if self.touch not in TOUCH_MODES:
            raise ConfigError(f"touch {self.touch!r} is unknown; use one of {TOUCH_MODES}")
        if self.pin not in PIN_MODES:
            raise ConfigError(f"pin {self.pin!r} is unknown; use one of {PIN_MODES}")
        for name, low, high in (
            ("host_bytes", 1 << 12, 1 << 47),
            ("copy_threads", 1, 256),
            ("max_registrations", 1, 4096),
            ("max_peers", 1, 65536),
            ("queue_limit", 1, 65536),
            ("lease_s", 0.01, 86400.0),
            ("pin_share", 0.01, 1.0),
            ("shutdown_s", 0.1, 3600.0),
            ("socket_limit_bytes", 1 << 24, 1 << 47),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise ConfigError(f"{name} {value} is outside {low} to {high}")
        for name, low, high in (
            ("copier_threads", 1, 4096),
            ("metrics_port", 0, 65535),
            ("numa_node", 0, 65535),
            ("program_cap", 1, 65536),
        ):
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ConfigError(f"{name} {value} is outside {low} to {high}")
        check_url(self.url, has_key=self.curve_key_file is not None)


def check_url(url: str, *, has_key: bool) -> None:
    """Raise ConfigError for a URL that cannot be served: a bad form, or open to the network."""
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise ConfigError(f"{url!r}: {error}") from error
    if parts.scheme == "ipc":
        path = url.removeprefix("ipc://")
        if not path.startswith("/"):
            raise ConfigError(f"{url!r}: an ipc socket needs an absolute path")
        length = len(os.fsencode(path))
        if length > _MAX_SOCKET_PATH or "\0" in path:
            raise ConfigError(
                f"{url!r}: a socket's path has at most {_MAX_SOCKET_PATH} bytes and no zero byte, "
                f"this one has {length}"
            )
        return
    if parts.scheme != "tcp":
        raise ConfigError(f"{url!r}: use ipc:///path/to/socket or tcp://127.0.0.1:port")
    try:
        port, host = parts.port, parts.hostname or ""
        address = ipaddress.ip_address(host)
    except ValueError as error:
        raise ConfigError(f"{url!r}: use tcp://<numeric address>:<port> ({error})") from error
    if port is None:
        raise ConfigError(f"{url!r}: a tcp address needs a port")
    if not address.is_loopback and not has_key:
        raise ConfigError(
            f"{url!r} is open to the network; bind to 127.0.0.1, or give --curve-key FILE"
        )


def default_socket_directory() -> Path:
    """A directory of the user alone: `$XDG_RUNTIME_DIR/hma-triton`, else under `/tmp`."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.path.isdir(runtime):
        return Path(runtime) / "hma-triton"
    return Path(f"/tmp/hma-triton-{os.getuid()}")


def default_url() -> str:
    """Where `hma-triton serve` listens when nothing is said."""
    return f"ipc://{default_socket_directory() / 'server.sock'}"


def prepare_socket_directory(url: str) -> None:
    """Make the directory of an ipc socket, mode 0700, and insist that it is the user's alone.

    Raises:
        ConfigError: it belongs to someone else, or others may enter it.
    """
    if not url.startswith("ipc://"):
        return
    directory = Path(url.removeprefix("ipc://")).parent
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = directory.lstat()
    except OSError as error:
        raise ConfigError(f"socket directory {directory}: {error.strerror}") from error
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid():
        raise ConfigError(f"socket directory {directory} is not a directory of this user")
    if stat.S_IMODE(info.st_mode) & 0o077:
        raise ConfigError(
            f"socket directory {directory} has mode {stat.S_IMODE(info.st_mode):04o}; others must "
            f"not enter it: chmod 700 {directory}"
        )
