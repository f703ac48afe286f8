"""Tickets for lookups, stores and retrieves: what is sent, and what becomes of each answer.

None of them raises for a server that is away, slow or unwilling; the answer says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from hma_triton import messages as m
from hma_triton.client.ticket import TIMEOUT, UNAVAILABLE, Ticket
from hma_triton.handles import EventHandle
from hma_triton.keys import pack_digests

IdList = Sequence[int] | npt.NDArray[np.integer]


def lookup_ticket(
    instance_id: str,
    request_id: str,
    digests: bytes,
    max_tokens: int,
    deadline_ns: int,
    release: Callable[[str, str], None],
) -> Ticket[m.LookupReply]:
    """A lookup; `release(instance_id, request_id)` is called for a hit that comes too late."""

    def make(seq: int) -> m.Request:
        return m.Lookup(
            seq=seq,
            instance_id=instance_id,
            request_id=request_id,
            digests=digests,
            max_tokens=max_tokens,
        )

    def convert(reply: m.Reply) -> m.LookupReply:
        if isinstance(reply, m.LookupReply):
            return reply
        return missed(request_id, _reason_of(reply))

    def late(reply: m.Reply) -> None:
        if isinstance(reply, m.LookupReply) and reply.tokens:
            release(instance_id, request_id)

    return Ticket(make, convert, deadline_ns, on_late=late)


def store_ticket(
    instance_id: str,
    rank: int,
    key: m.ChunkRange,
    block_ids: Sequence[IdList],
    deadline_ns: int,
    event: EventHandle | None,
) -> Ticket[m.StoreReply]:
    """A store; given up at its deadline, after which the server commits nothing of it."""
    packed = tuple(m.pack_block_ids(ids) for ids in block_ids)

    def make(seq: int) -> m.Request:
        return m.Store(
            seq=seq,
            instance_id=instance_id,
            rank=rank,
            key=key,
            block_ids=packed,
            deadline_ns=deadline_ns,
            event=event,
        )

    def convert(reply: m.Reply) -> m.StoreReply:
        if isinstance(reply, m.StoreReply):
            return reply
        code, message = _failure_of(reply)
        return m.StoreReply(seq=reply.seq, code=code, message=message)

    return Ticket(make, convert, deadline_ns)


def retrieve_ticket(
    instance_id: str,
    rank: int,
    request_id: str,
    digests: bytes | Sequence[bytes],
    skip_tokens: int,
    block_ids: Sequence[IdList],
    deadline_ns: int,
    event: EventHandle | None,
) -> Ticket[m.RetrieveReply]:
    """A retrieve; open until the server has answered, or is known dead."""
    packed_digests = pack_digests(digests)
    packed = tuple(m.pack_block_ids(ids) for ids in block_ids)

    def make(seq: int) -> m.Request:
        return m.Retrieve(
            seq=seq,
            instance_id=instance_id,
            rank=rank,
            request_id=request_id,
            digests=packed_digests,
            skip_tokens=skip_tokens,
            block_ids=packed,
            deadline_ns=deadline_ns,
            event=event,
        )

    def convert(reply: m.Reply) -> m.RetrieveReply:
        if isinstance(reply, m.RetrieveReply):
            return reply
        code, message = _failure_of(reply)
        return m.RetrieveReply(
            seq=reply.seq, request_id=request_id, ok=False, code=code, message=message
        )

    return Ticket(make, convert, deadline_ns, holds_pool=True)


def missed(request_id: str, reason: str) -> m.LookupReply:
    """A miss."""
    return m.LookupReply(seq=0, request_id=request_id, tokens=0, chunks=0, reason=reason)


def _failure_of(reply: m.Reply) -> tuple[str, str]:
    if isinstance(reply, m.ErrorReply):
        return reply.code, reply.message
    return m.ErrorCode.INTERNAL.value, f"{type(reply).__name__} is no answer to this request"


def _reason_of(reply: m.Reply) -> str:
    code, message = _failure_of(reply)
    return code if code in (UNAVAILABLE, TIMEOUT) else f"error: {code}: {message[:200]}"
