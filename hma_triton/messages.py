"""The words that clients and the server exchange: tagged, frozen structs, one union per direction.

One message is one msgpack frame. A request carries `seq`, chosen by the client; its reply
carries the same `seq`. Replies come in any order. Digests and block ids travel packed, as bytes.
Times are absolute nanoseconds of `CLOCK_MONOTONIC`: client and server share a kernel, or they
have no data path and are refused. `docs/protocol.md` describes every message and its order rules.

New fields come last, with defaults; unknown fields are ignored; an unknown tag is answered with
`ErrorCode.UNKNOWN_MESSAGE`. Every array and string has a bound, checked before memory is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Annotated, get_args

import msgspec
import numpy as np
import numpy.typing as npt

from hma_triton.errors import ProtocolError
from hma_triton.group_view import EngineGroupInfo
from hma_triton.handles import (
    MAX_LAYERS,
    Count,
    EventHandle,
    LayerHandle,
    Name,
    ProcessRef,
    StorageHandle,
)

PROTOCOL_VERSION = 1
DIGEST_BYTES = 32
MAX_FRAME_BYTES = 8 << 20
MAX_CHUNKS = 1 << 17
MAX_INFOS = 1024

Text = Annotated[str, msgspec.Meta(max_length=8192)]
Seq = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Digest = Annotated[bytes, msgspec.Meta(max_length=DIGEST_BYTES)]
Digests = Annotated[bytes, msgspec.Meta(max_length=MAX_CHUNKS * DIGEST_BYTES)]
PackedIds = Annotated[bytes, msgspec.Meta(max_length=MAX_FRAME_BYTES)]
BlockIds = Annotated[tuple[PackedIds, ...], msgspec.Meta(max_length=MAX_INFOS)]
Facts = Annotated[dict[Name, Text], msgspec.Meta(max_length=256)]


class ErrorCode(str, Enum):
    """Why a request failed. On the wire it is a plain string; clients keep unknown ones."""

    MALFORMED = "malformed"
    UNKNOWN_MESSAGE = "unknown_message"
    UNSUPPORTED_VERSION = "unsupported_version"
    NOT_GREETED = "not_greeted"
    NO_DATA_PATH = "no_data_path"
    UNKNOWN_INSTANCE = "unknown_instance"
    BAD_REGISTRATION = "bad_registration"
    TOO_MANY_REGISTRATIONS = "too_many_registrations"
    BAD_REQUEST = "bad_request"
    BUSY = "busy"
    CAPACITY = "capacity"
    DEADLINE = "deadline"
    ABORTED = "aborted"
    MISSING = "missing"
    CHECKSUM = "checksum"
    TRANSFER = "transfer"
    SHUTTING_DOWN = "shutting_down"
    INTERNAL = "internal"


class ChunkRange(msgspec.Struct, frozen=True):
    """Whole chunks `[start_chunk, start_chunk + n)` of one token sequence.

    `digests` is n digests of `DIGEST_BYTES`; `parent` is the digest of chunk
    `start_chunk - 1`, empty when `start_chunk` is 0.
    """

    start_chunk: Annotated[int, msgspec.Meta(ge=0, lt=MAX_CHUNKS)]
    digests: Digests
    parent: Digest = b""


class _Request(msgspec.Struct, frozen=True, kw_only=True, tag_field="op"):
    seq: Seq


class Hello(_Request, frozen=True, kw_only=True, tag="hello"):
    """The first message of a connection; saying it again changes nothing.

    `role` is free text for the status view.
    """

    version: Count
    process: ProcessRef
    role: Name = ""


class Goodbye(_Request, frozen=True, kw_only=True, tag="goodbye"):
    """The client closes: its leases and registrations end."""


class RegisterKVCache(_Request, frozen=True, kw_only=True, tag="register_kv_cache"):
    """Give the server one rank's pool and its groups.

    `storages` are the segments, `kv_caches` the layers over them in registration order.
    `chunk_tokens` is the tokens of one object. `facts` are engine settings that change the
    bytes or their meaning (`keys.EngineFacts`). `replicated_infos` holds positions in
    `engine_group_infos` whose bytes are equal on all ranks. `separate_object_groups` None
    takes the server's setting.
    """

    instance_id: Name
    storages: Annotated[tuple[StorageHandle, ...], msgspec.Meta(max_length=MAX_LAYERS)]
    kv_caches: Annotated[tuple[LayerHandle, ...], msgspec.Meta(max_length=MAX_LAYERS)]
    model_name: Name
    world_size: Annotated[int, msgspec.Meta(ge=1, le=4096)]
    engine_type: Name
    layout_hints: Facts
    engine_group_infos: Annotated[tuple[EngineGroupInfo, ...], msgspec.Meta(max_length=MAX_INFOS)]
    rank: Annotated[int, msgspec.Meta(ge=0, lt=4096)] = 0
    namespace: Name = ""
    chunk_tokens: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)] = 256
    null_block_id: Annotated[int, msgspec.Meta(ge=-1, lt=1 << 31)] | None = 0
    facts: Facts = {}
    replicated_infos: Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_INFOS)] = ()
    separate_object_groups: bool | None = None


class Unregister(_Request, frozen=True, kw_only=True, tag="unregister"):
    """Take back one rank's pool. Answered when no copy touches the pool any more."""

    instance_id: Name
    rank: Annotated[int, msgspec.Meta(ge=0, lt=4096)] = 0


class Lookup(_Request, frozen=True, kw_only=True, tag="lookup"):
    """How long a prefix can be served? Pins it, once per (instance, request)."""

    instance_id: Name
    request_id: Name
    digests: Digests
    max_tokens: Count


class Store(_Request, frozen=True, kw_only=True, tag="store"):
    """Copy chunks out of the pool. `block_ids[i]` covers exactly the tokens of `key`.

    The objects become visible only if the copy ended before `deadline_ns`.
    """

    instance_id: Name
    rank: Annotated[int, msgspec.Meta(ge=0, lt=4096)]
    key: ChunkRange
    block_ids: BlockIds
    deadline_ns: Count
    event: EventHandle | None = None


class Retrieve(_Request, frozen=True, kw_only=True, tag="retrieve"):
    """Copy chunks `[0, n)` into the pool, without the first `skip_tokens` tokens.

    `block_ids[i]` covers exactly the tokens of the `n` digests. The copy does not start after
    `deadline_ns`.
    """

    instance_id: Name
    rank: Annotated[int, msgspec.Meta(ge=0, lt=4096)]
    request_id: Name
    digests: Digests
    skip_tokens: Count
    block_ids: BlockIds
    deadline_ns: Count
    event: EventHandle | None = None


class Release(_Request, frozen=True, kw_only=True, tag="release"):
    """End the lease of (instance, request), if there is one."""

    instance_id: Name
    request_id: Name


class Abort(_Request, frozen=True, kw_only=True, tag="abort"):
    """Give up the store or retrieve sent as `target_seq`.

    Answered when that operation no longer touches the pool: at once when it had not started.
    """

    target_seq: Seq


class Ping(_Request, frozen=True, kw_only=True, tag="ping"):
    """Is the server alive?"""


class Status(_Request, frozen=True, kw_only=True, tag="status"):
    """Ask for the server's state as JSON."""


class Clear(_Request, frozen=True, kw_only=True, tag="clear"):
    """Forget every key of the instance's namespace."""

    instance_id: Name


Request = (
    Hello
    | Goodbye
    | RegisterKVCache
    | Unregister
    | Lookup
    | Store
    | Retrieve
    | Release
    | Abort
    | Ping
    | Status
    | Clear
)


class _Reply(msgspec.Struct, frozen=True, kw_only=True, tag_field="op"):
    seq: Seq


class HelloReply(_Reply, frozen=True, kw_only=True, tag="hello_reply"):
    """The server's version and process, and an id that is new with every start."""

    version: Count
    process: ProcessRef
    server_id: Name
    lease_s: float = 0.0


class RegisterReply(_Reply, frozen=True, kw_only=True, tag="register_reply"):
    """What the server made of the pool.

    `object_nbytes` per object group; `fingerprint` is the hex name of the key namespace; `ranks`
    counts the registered ranks of the instance; `backend` names the copy path.
    """

    object_nbytes: tuple[Count, ...]
    chunk_tokens: Count
    fingerprint: Name
    ranks: Count
    backend: Name = ""


class Done(_Reply, frozen=True, kw_only=True, tag="done"):
    """The request was carried out. `count` is what it says in the request's row."""

    count: Count = 0


class LookupReply(_Reply, frozen=True, kw_only=True, tag="lookup_reply"):
    """`tokens` of the prefix can be served, in `chunks`; `reason` says why not more."""

    request_id: Name
    tokens: Count
    chunks: Count
    reason: Name


class StoreReply(_Reply, frozen=True, kw_only=True, tag="store_reply"):
    """`stored` objects were written and committed, `skipped` were there or not storable.

    `code` is empty when the store was carried out, else an `ErrorCode`: nothing was committed.
    """

    stored: Count = 0
    skipped: Count = 0
    nbytes: Count = 0
    seconds: float = 0.0
    code: Name = ""
    message: Text = ""


class RetrieveReply(_Reply, frozen=True, kw_only=True, tag="retrieve_reply"):
    """`ok`: every non-null id between `skip_tokens` and the end was written.

    Otherwise `code` says why, and any of the blocks named may hold anything.
    """

    request_id: Name
    ok: bool
    nbytes: Count = 0
    seconds: float = 0.0
    code: Name = ""
    message: Text = ""


class AbortReply(_Reply, frozen=True, kw_only=True, tag="abort_reply"):
    """The pool is touched no more: `state` is `cancelled`, `ended`, or `unknown` to this server."""

    target_seq: Seq
    state: Name


class Pong(_Reply, frozen=True, kw_only=True, tag="pong"):
    """Answer to `Ping`."""

    server_id: Name
    monotonic_ns: Count


class StatusReply(_Reply, frozen=True, kw_only=True, tag="status_reply"):
    """The server's state: one JSON object, described in `docs/protocol.md`."""

    json: Annotated[bytes, msgspec.Meta(max_length=MAX_FRAME_BYTES)]


class ErrorReply(_Reply, frozen=True, kw_only=True, tag="error"):
    """The request was not carried out. `code` is an `ErrorCode`."""

    code: Name
    message: Text


Reply = (
    HelloReply
    | RegisterReply
    | Done
    | LookupReply
    | StoreReply
    | RetrieveReply
    | AbortReply
    | Pong
    | StatusReply
    | ErrorReply
)


class _Envelope(msgspec.Struct, frozen=True):
    seq: int = 0
    op: str = ""


_encoder = msgspec.msgpack.Encoder()
_envelope_decoder = msgspec.msgpack.Decoder(_Envelope)
REQUEST_TAGS = frozenset(str(request.__struct_config__.tag) for request in get_args(Request))


def encode(message: Request | Reply) -> bytes:
    """One frame."""
    return _encoder.encode(message)


class RequestDecoder:
    """Decodes requests. One for each socket."""

    def __init__(self) -> None:
        self._decoder = msgspec.msgpack.Decoder(Request)

    def decode(self, frame: bytes) -> Request | ErrorReply:
        """The request, or the error that answers the frame. Never raises for any bytes."""
        try:
            return self._decoder.decode(frame)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            return _explain(frame, str(error))


def _explain(frame: bytes, why: str) -> ErrorReply:
    try:
        envelope = _envelope_decoder.decode(frame)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return ErrorReply(seq=0, code=ErrorCode.MALFORMED.value, message=why[:500])
    seq = envelope.seq if 0 <= envelope.seq < 1 << 63 else 0
    code = ErrorCode.MALFORMED if envelope.op in REQUEST_TAGS else ErrorCode.UNKNOWN_MESSAGE
    return ErrorReply(seq=seq, code=code.value, message=why[:500])


class ReplyDecoder:
    """Decodes replies. One for each socket."""

    def __init__(self) -> None:
        self._decoder = msgspec.msgpack.Decoder(Reply)

    def decode(self, frame: bytes) -> Reply:
        """Raises: ProtocolError for a frame that is no reply of this version."""
        try:
            return self._decoder.decode(frame)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise ProtocolError(f"the server sent a frame that is no reply: {error}") from error


def pack_block_ids(block_ids: Sequence[int] | npt.NDArray[np.integer]) -> bytes:
    """Little-endian int32. Raises: ProtocolError for an id outside int32."""
    ids = np.asarray(block_ids, dtype=np.int64)
    if ids.size and (int(ids.min()) < -(1 << 31) or int(ids.max()) >= 1 << 31):
        raise ProtocolError(f"block ids {int(ids.min())}..{int(ids.max())} do not fit in 32 bits")
    return ids.astype("<i4").tobytes()


def unpack_block_ids(packed: bytes) -> npt.NDArray[np.int64]:
    """[n] int64. Raises: ProtocolError when the length is no multiple of 4 bytes."""
    if len(packed) % 4:
        raise ProtocolError(f"{len(packed)} bytes of block ids are no multiple of 4")
    return np.frombuffer(packed, dtype="<i4").astype(np.int64)
