"""The engine's own server, when none is configured: one per engine, ended with it.

Every process of the engine derives the same address from the engine's instance id. Whichever rank
comes first starts the server, under a lock on the folder of the sockets; the server watches the
process that started it and ends when that ends, however it ends.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hma_triton.client import HmaClient
from hma_triton.config import ServerConfig
from hma_triton.errors import ConfigError, HmaError
from hma_triton.server.launch import EmbeddedServer, start_embedded

PROBE_SECONDS = 0.25


def socket_folder() -> Path:
    """The user's folder for sockets of embedded servers, made with mode 0700.

    Raises:
        ConfigError: something else is there, or it belongs to someone else.
    """
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    folder = Path(base) / f"hma-triton-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    info = folder.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o077:
        raise ConfigError(
            f"{folder} must be a folder of user {os.getuid()} with mode 0700; remove it, or set "
            "hma.server_url"
        )
    return folder


def embedded_url(instance_id: str) -> str:
    """The address of the embedded server of this engine instance."""
    name = hashlib.sha256(instance_id.encode()).hexdigest()[:16]
    return f"ipc://{socket_folder()}/{name}.sock"


def ensure_embedded_server(
    instance_id: str, host_bytes: int, timeout_s: float
) -> EmbeddedServer | None:
    """Start this instance's server, unless another process of the engine has. None: it has.

    Raises:
        HmaError: the server did not start within `timeout_s`, or cannot have `host_bytes`.
    """
    url = embedded_url(instance_id)
    with _locked(socket_folder()):
        if _answers(url):
            return None
        return start_embedded(ServerConfig(url=url, host_bytes=host_bytes), timeout_s=timeout_s)


def _answers(url: str) -> bool:
    if not Path(url.removeprefix("ipc://")).exists():
        return False
    client = HmaClient(url, role="probe")
    try:
        client.connect(PROBE_SECONDS)
    except HmaError:
        return False
    finally:
        client.close()
    return True


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Holds the folder's lock; the kernel lets go of it when the process ends."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
