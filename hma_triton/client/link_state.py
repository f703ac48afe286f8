"""How far a connection to a server has come."""

from __future__ import annotations

from enum import Enum


class LinkState(Enum):
    """`AWAY`: no server has answered. `REGISTERING`: it has, pools are on their way."""

    AWAY = "away"
    REGISTERING = "registering"
    READY = "ready"
