"""The client's socket, with its limits, and what may be sent over it."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import numpy as np
import zmq

from hma_triton import messages as m
from hma_triton.curve_keys import CurveKeys
from hma_triton.errors import ProtocolError

log = logging.getLogger("hma_triton.client")


def dealer(context: zmq.Context[Any], identity: bytes, keys: CurveKeys | None) -> zmq.Socket[bytes]:
    """A socket that is not connected yet; `identity` is the client's name at the server."""
    socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.ROUTING_ID, identity)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.MAXMSGSIZE, 4 * m.MAX_FRAME_BYTES)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, 2000)
    socket.setsockopt(zmq.RECONNECT_IVL, 100)
    if keys is not None:
        socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server_public.encode())
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.client_public.encode())
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.client_secret.encode())
    return socket


def send(socket: zmq.Socket[bytes], request: m.Request) -> bool:
    """Send without waiting; whether there was room.

    Raises:
        ProtocolError: as `encode_request`.
    """
    frame = encode_request(request)
    try:
        socket.send(frame, zmq.NOBLOCK)
    except zmq.ZMQError as error:
        log.debug("a request could not be sent: %s", error)
        return False
    return True


def _plain(value: object) -> int:
    """Engines count in numpy's integers too."""
    if isinstance(value, np.integer):
        return int(value)
    raise TypeError(f"{value!r:.80} has no place in a message")


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)


def encode_request(request: m.Request) -> bytes:
    """One frame that a server takes.

    Raises:
        ProtocolError: a field that no message can hold, or more than one message can.
    """
    tag = request.__struct_config__.tag
    try:
        frame = _encoder.encode(request)
    except (TypeError, ValueError, OverflowError) as error:
        raise ProtocolError(f"a {tag} request cannot be sent: {error}") from error
    if len(frame) > m.MAX_FRAME_BYTES:
        raise ProtocolError(
            f"a {tag} request of {len(frame)} bytes cannot be sent: a message has at most "
            f"{m.MAX_FRAME_BYTES}; ask for fewer chunks at once"
        )
    return frame
