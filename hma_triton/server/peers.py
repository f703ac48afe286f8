"""Connections that have said hello, and the processes behind them."""

from __future__ import annotations

from dataclasses import dataclass

from hma_triton.errors import RemoteError
from hma_triton.handles import ProcessRef
from hma_triton.messages import PROTOCOL_VERSION, ErrorCode, Hello
from hma_triton.process_identity import ProcessWatch


@dataclass(slots=True, eq=False)
class Peer:
    """One greeted connection."""

    identity: bytes
    process: ProcessRef
    role: str
    requests: int = 0
    errors: int = 0


class PeerTable:
    """Greeted connections by identity, with one death watch per process."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._peers: dict[bytes, Peer] = {}
        self._watches: dict[ProcessRef, ProcessWatch] = {}

    def __len__(self) -> int:
        return len(self._peers)

    def all(self) -> list[Peer]:
        """Every greeted connection."""
        return list(self._peers.values())

    def get(self, identity: bytes) -> Peer | None:
        """The connection, if it has said hello."""
        return self._peers.get(identity)

    def greet(self, identity: bytes, hello: Hello) -> tuple[Peer, Peer | None]:
        """Enter a connection; gives it, and the one of another process that it takes the place of.

        A client that says hello again keeps its state.

        Raises:
            RemoteError: another protocol version, or too many peers.
            ServerUnavailableError: the process named is gone.
        """
        if hello.version != PROTOCOL_VERSION:
            raise RemoteError(
                f"protocol version {hello.version}; this server speaks {PROTOCOL_VERSION}: install "
                "the same hma-triton on both sides",
                ErrorCode.UNSUPPORTED_VERSION.value,
            )
        earlier = self._peers.get(identity)
        if earlier is not None and earlier.process == hello.process:
            return earlier, None
        if earlier is None and len(self._peers) >= self._limit:
            raise RemoteError(
                f"{len(self._peers)} peers are connected, the limit is {self._limit}",
                ErrorCode.BUSY.value,
            )
        if hello.process not in self._watches:
            self._watches[hello.process] = ProcessWatch(hello.process)
        if earlier is not None:
            self.drop(earlier)
        peer = Peer(identity, hello.process, hello.role)
        self._peers[identity] = peer
        return peer, earlier

    def watched(self) -> dict[int, ProcessRef]:
        """Descriptors that become readable when a process ends."""
        return {watch.fileno(): process for process, watch in self._watches.items()}

    def drop(self, peer: Peer) -> None:
        """Forget a connection, and stop watching its process when it was the last one."""
        if self._peers.get(peer.identity) is peer:
            del self._peers[peer.identity]
        if all(other.process != peer.process for other in self._peers.values()):
            watch = self._watches.pop(peer.process, None)
            if watch is not None:
                watch.close()

    def of_process(self, process: ProcessRef) -> list[Peer]:
        """The connections of one process."""
        return [peer for peer in self._peers.values() if peer.process == process]

    def close(self) -> None:
        """Stop watching everybody."""
        for watch in self._watches.values():
            watch.close()
        self._watches.clear()
