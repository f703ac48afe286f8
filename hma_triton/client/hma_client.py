"""The client of the cache server: one per process that talks to it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from hma_triton import messages as m
from hma_triton.client.link import Link
from hma_triton.client.link_state import LinkState
from hma_triton.client.requests import (
    IdList,
    lookup_ticket,
    missed,
    retrieve_ticket,
    store_ticket,
)
from hma_triton.client.ticket import TIMEOUT, UNAVAILABLE, Ticket, let_answers_in
from hma_triton.errors import ProtocolError, RemoteError, ServerUnavailableError
from hma_triton.group_view import EngineGroupInfo
from hma_triton.handles import EventHandle
from hma_triton.keys import EngineFacts, pack_digests
from hma_triton.tensor_ipc import KVCaches, export_kv_caches

Expected = TypeVar("Expected")


class HmaClient:
    """Talks to the server at `url`; connects in the background and again after the server's end.

    Making one does not block and needs no server yet. Lookups, stores and retrieves never raise for
    a server that is away, slow or unwilling: their reply says so, and it counts as a miss.

    Args:
        timeout_s: how long a request waits for its reply when the call names no time.
        connect_timeout_s: how long `connect` and registrations wait, and how long requests made
            right after the start are kept for a server that is still coming up.
        role: free text for the server's status view.
        curve_key: key file for a server on a network address.

    Raises:
        ConfigError: a URL that is no address, or a key file that cannot be used.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 5.0,
        connect_timeout_s: float = 10.0,
        role: str = "",
        curve_key: str | Path | None = None,
    ) -> None:
        self._timeout_s = timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._link = Link(
            url, role, connect_timeout_s, None if curve_key is None else Path(curve_key)
        )
        self._lookups: dict[str, Ticket[m.LookupReply]] = {}

    # the connection

    def connect(self, timeout_s: float | None = None) -> m.HelloReply:
        """Wait for the server's hello.

        Raises:
            ServerUnavailableError: no server in time.
            RemoteError: the server refuses this client: version, or no path for the data.
        """
        patience = self._connect_timeout_s if timeout_s is None else timeout_s
        self._link.wait_ready(patience)
        refusal, hello = self._link.refusal, self._link.hello
        if refusal is not None:
            raise RemoteError(refusal.message, refusal.code)
        if hello is None or self._link.state is not LinkState.READY:
            raise ServerUnavailableError(
                f"no cache server answered on {self._link.url} within {patience} s"
            )
        return hello

    @property
    def connected(self) -> bool:
        """Whether a server has answered and has all pools of this client."""
        return self._link.state is LinkState.READY

    @property
    def server_id(self) -> str | None:
        """New with every start of the server; None without one."""
        hello = self._link.hello
        return None if hello is None else hello.server_id

    @property
    def lease_s(self) -> float | None:
        """How long what a lookup found stays pinned, in seconds; None without a server."""
        hello = self._link.hello
        return None if hello is None else hello.lease_s

    def close(self) -> None:
        """End the connection; the server drops the leases and pools of this client. Idempotent."""
        self._link.close()

    def __enter__(self) -> HmaClient:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()

    # pools

    def register_kv_caches(
        self,
        instance_id: str,
        kv_caches: KVCaches,
        model_name: str,
        world_size: int,
        engine_type: str,
        layout_hints: Mapping[str, str] | None,
        engine_group_infos: Sequence[EngineGroupInfo],
        rank: int = 0,
        namespace: str = "",
        *,
        chunk_tokens: int = 256,
        facts: EngineFacts | None = None,
        replicated_infos: Sequence[int] = (),
        null_block_id: int | None = 0,
        separate_object_groups: bool | None = None,
        timeout_s: float | None = None,
    ) -> m.RegisterReply:
        """Move the pools into shared memory, in place, and give them to the server.

        The client registers them again by itself when the server was restarted or has lost them.

        Raises:
            CapacityError: shared memory is too small.
            UnsupportedLayoutError: a cache that cannot be shared; names the layer.
            RemoteError: the server refuses; `code` and message say why.
            ServerUnavailableError: no server, or no answer in time.
        """
        storages, layers = export_kv_caches(kv_caches)
        # as they are now: this is sent again, perhaps much later
        sent_facts = (facts or EngineFacts()).to_wire()
        hints, infos = dict(layout_hints or {}), tuple(engine_group_infos)
        replicated = tuple(replicated_infos)

        def make(seq: int) -> m.Request:
            return m.RegisterKVCache(
                seq=seq,
                instance_id=instance_id,
                storages=storages,
                kv_caches=layers,
                model_name=model_name,
                world_size=world_size,
                engine_type=engine_type,
                layout_hints=hints,
                engine_group_infos=infos,
                rank=rank,
                namespace=namespace,
                chunk_tokens=chunk_tokens,
                null_block_id=null_block_id,
                facts=sent_facts,
                replicated_infos=replicated,
                separate_object_groups=separate_object_groups,
            )

        patience = self._connect_timeout_s if timeout_s is None else timeout_s
        reply = self._ask(make, m.RegisterReply, patience)
        self._link.remember((instance_id, rank), make)
        return reply

    def unregister(self, instance_id: str, rank: int = 0, timeout_s: float | None = None) -> None:
        """Take a pool back; when this returns, the server touches it no more.

        Raises:
            RemoteError: it was not registered. ServerUnavailableError: no server, or no answer.
        """
        self._link.forget((instance_id, rank))
        self._ask(
            lambda seq: m.Unregister(seq=seq, instance_id=instance_id, rank=rank),
            m.Done,
            timeout_s,
        )

    # hits

    def lookup_submit(
        self,
        instance_id: str,
        request_id: str,
        digests: bytes | Sequence[bytes],
        max_tokens: int,
        limit_s: float | None = None,
    ) -> None:
        """Ask how much of a prefix can be served; `lookup_poll` has the answer later.

        While an answer is pending this does nothing; after it, it asks anew. `digests` are those of
        chunks 0 and on.
        """
        pending = self._lookups.get(request_id)
        if pending is None or pending.done:
            self._lookups[request_id] = self._lookup(
                instance_id, request_id, pack_digests(digests), max_tokens, limit_s
            )

    def lookup_poll(self, request_id: str) -> m.LookupReply | None:
        """The answer, None while there is none; a miss when `limit_s` passed or nothing was asked.

        The answer stays until `release`.
        """
        ticket = self._lookups.get(request_id)
        return missed(request_id, "unknown request") if ticket is None else ticket.poll()

    def lookup(
        self,
        instance_id: str,
        request_id: str,
        digests: bytes | Sequence[bytes],
        max_tokens: int,
        timeout_s: float | None = None,
    ) -> m.LookupReply:
        """`lookup_submit` and wait; the same misses."""
        packed = pack_digests(digests)
        ticket = self._lookup(instance_id, request_id, packed, max_tokens, timeout_s)
        return ticket.result()

    def _lookup(
        self,
        instance_id: str,
        request_id: str,
        digests: bytes,
        max_tokens: int,
        limit_s: float | None,
    ) -> Ticket[m.LookupReply]:
        def release_late(instance_id: str, request_id: str) -> None:
            # a newer lookup of the request has taken over what this one pinned
            if self._lookups.get(request_id) in (None, ticket):
                self._tell_release(instance_id, request_id)

        ticket = lookup_ticket(
            instance_id,
            request_id,
            digests,
            max_tokens,
            self._deadline_ns(limit_s),
            release_late,
        )
        if digests:
            self._link.submit(ticket)
        else:
            ticket.resolve(missed(request_id, "none"))
        return ticket

    def release(self, instance_id: str, request_id: str) -> None:
        """Give up what a lookup pinned and forget its answer. Does not wait."""
        ticket = self._lookups.pop(request_id, None)
        if ticket is not None:
            ticket.withdrawn = True
        self._tell_release(instance_id, request_id)

    def _tell_release(self, instance_id: str, request_id: str) -> None:
        self._link.tell(
            lambda seq: m.Release(seq=seq, instance_id=instance_id, request_id=request_id)
        )

    let_answers_in = staticmethod(let_answers_in)

    # copies

    def store_submit(
        self,
        instance_id: str,
        rank: int,
        start_chunk: int,
        digests: bytes | Sequence[bytes],
        parent: bytes,
        block_ids: Sequence[IdList],
        *,
        deadline_s: float | None = None,
        event: EventHandle | None = None,
    ) -> Ticket[m.StoreReply]:
        """Store chunks from `start_chunk` on; `parent` is the digest before them, b"" at chunk 0.

        `block_ids[i]` (one list per info) covers exactly the tokens of the chunks. The server
        commits only if its copy ended within `deadline_s`; a reply with a `code` committed nothing.

        Raises:
            ProtocolError: digests or ids that cannot be sent.
        """
        key = m.ChunkRange(
            start_chunk=start_chunk,
            digests=pack_digests(digests),
            parent=pack_digests([parent]) if parent else b"",
        )
        ticket = store_ticket(
            instance_id, rank, key, block_ids, self._deadline_ns(deadline_s), event
        )
        self._link.submit(ticket)
        return ticket

    def store(self, *args: Any, **options: Any) -> m.StoreReply:
        """`store_submit` with the same arguments, and wait: never longer than `deadline_s`."""
        return self.store_submit(*args, **options).result()

    def retrieve_submit(
        self,
        instance_id: str,
        rank: int,
        request_id: str,
        digests: bytes | Sequence[bytes],
        skip_tokens: int,
        block_ids: Sequence[IdList],
        *,
        deadline_s: float | None = None,
        event: EventHandle | None = None,
    ) -> Ticket[m.RetrieveReply]:
        """Load the chunks of `digests`, from chunk 0 on, into the pool behind `skip_tokens`.

        `block_ids[i]` covers exactly the tokens of the digests. The ticket stays open until the
        server has answered or is known dead: the blocks are not the caller's before that.

        Raises:
            ProtocolError: digests or ids that cannot be sent.
        """
        ticket = retrieve_ticket(
            instance_id,
            rank,
            request_id,
            digests,
            skip_tokens,
            block_ids,
            self._deadline_ns(deadline_s),
            event,
        )
        self._link.submit(ticket)
        return ticket

    def retrieve(self, *args: Any, **options: Any) -> m.RetrieveReply:
        """`retrieve_submit` with the same arguments, and wait, for a stopped server too."""
        return self.retrieve_submit(*args, **options).result()

    # the rest

    def clear(self, instance_id: str, timeout_s: float | None = None) -> int:
        """Forget all keys of the instance's namespace; gives how many chunks that were.

        Raises:
            RemoteError: the instance is unknown. ServerUnavailableError: no server, or no answer.
        """
        return self._ask(
            lambda seq: m.Clear(seq=seq, instance_id=instance_id), m.Done, timeout_s
        ).count

    def ping(self, timeout_s: float | None = None) -> float:
        """Seconds of a round trip.

        Raises:
            ServerUnavailableError: no server, or no answer.
        """
        started = time.perf_counter()
        self._ask(lambda seq: m.Ping(seq=seq), m.Pong, timeout_s)
        return time.perf_counter() - started

    def status(self, timeout_s: float | None = None) -> dict[str, Any]:
        """The server's state (`docs/protocol.md`).

        Raises:
            ServerUnavailableError: no server, or no answer.
        """
        reply = self._ask(lambda seq: m.Status(seq=seq), m.StatusReply, timeout_s)
        state: dict[str, Any] = msgspec.json.decode(reply.json)
        return state

    def _deadline_ns(self, seconds: float | None) -> int:
        # a year is no limit, and fits into a message
        patience = min(self._timeout_s if seconds is None else seconds, 365 * 86400.0)
        return time.monotonic_ns() + int(patience * 1e9)

    def _ask(
        self,
        make: Callable[[int], m.Request],
        kind: type[Expected],
        timeout_s: float | None,
    ) -> Expected:
        ticket: Ticket[m.Reply] = Ticket(
            make, lambda reply: reply, self._deadline_ns(timeout_s), waits_for_server=True
        )
        self._link.submit(ticket)
        reply = ticket.result()
        if isinstance(reply, kind):
            return reply
        if isinstance(reply, m.ErrorReply):
            if reply.code in (UNAVAILABLE, TIMEOUT):
                raise ServerUnavailableError(reply.message)
            raise RemoteError(reply.message, reply.code)
        raise ProtocolError(f"{type(reply).__name__} where {kind.__name__} was expected")
