"""Lets in only clients that hold the key file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator

from hma_triton.curve_keys import CurveKeys, read_key_file


class _OnlyThisClient:
    """Credentials provider: one client key."""

    def __init__(self, keys: CurveKeys) -> None:
        self._client = keys.client_public.encode()

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether the client with that Z85 public key may come in."""
        return key == self._client


class CurveGate:
    """Without a key file an open door, which only local sockets get."""

    def __init__(self, context: zmq.Context[Any], key_file: str | None) -> None:
        self._keys = None if key_file is None else read_key_file(Path(key_file))
        self._authenticator: ThreadAuthenticator | None = None
        if self._keys is not None:
            self._authenticator = ThreadAuthenticator(context)
            self._authenticator.start()
            self._authenticator.configure_curve_callback(
                credentials_provider=_OnlyThisClient(self._keys)
            )

    def protect(self, socket: zmq.Socket[bytes]) -> None:
        """Make the socket demand the key. Call it before binding."""
        if self._keys is not None:
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_SECRETKEY, self._keys.server_secret.encode())

    def close(self) -> None:
        """End the thread that checks keys."""
        if self._authenticator is not None:
            self._authenticator.stop()
