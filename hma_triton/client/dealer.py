"""The client's socket, with its limits."""

from __future__ import annotations

from typing import Any

import zmq

from hma_triton import messages as m
from hma_triton.curve_keys import CurveKeys


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
