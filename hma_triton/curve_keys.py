"""The key file that lets a server be reached over a network address, and keeps others out.

One JSON file of mode 0600 holds the server's key pair and one client key pair; whoever can read it
may connect. The keys are CURVE keys (Curve25519) in Z85, as ZeroMQ takes them.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

import msgspec
import zmq

from hma_triton.errors import ConfigError


class CurveKeys(msgspec.Struct, frozen=True):
    """Z85 keys of 40 characters."""

    server_public: str
    server_secret: str
    client_public: str
    client_secret: str


def make_key_file(path: Path) -> None:
    """Write a new key file, mode 0600.

    Raises:
        ConfigError: the file is there already, or cannot be written.
    """
    server_public, server_secret = zmq.curve_keypair()
    client_public, client_secret = zmq.curve_keypair()
    keys = CurveKeys(
        server_public=server_public.decode(),
        server_secret=server_secret.decode(),
        client_public=client_public.decode(),
        client_secret=client_secret.decode(),
    )
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"key file {path}: {error.strerror}") from error
    with os.fdopen(fd, "wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(keys)) + b"\n")


def read_key_file(path: Path) -> CurveKeys:
    """Raises: ConfigError for a file that is missing, malformed, or readable by others."""
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & 0o077:
            raise ConfigError(f"key file {path} has mode {mode:04o}; chmod 600 it")
        keys = msgspec.json.decode(path.read_bytes(), type=CurveKeys)
    except OSError as error:
        raise ConfigError(f"key file {path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"key file {path} is no key file: {error}") from error
    for name in keys.__struct_fields__:
        if len(getattr(keys, name)) != 40:
            raise ConfigError(f"key file {path}: {name} has no 40 characters")
    return keys
