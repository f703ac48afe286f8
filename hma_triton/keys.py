"""Names of cached bytes: a digest per chunk, a fingerprint for everything that changes the bytes.

An object's key is (fingerprint, chunk digest, object group, rank). Digests are chained: the digest
of chunk i stands for all tokens up to its end. Engines with hashes of their own bring them (vLLM's
cover LoRA, multimodal inputs and the salt); `chunk_digests` is for those without.

The fingerprint is SHA-256 over a canonical encoding: msgpack of a map with sorted keys, every
field present, absent values as nil. Adding a field changes every fingerprint, which turns old
objects into misses.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from hma_triton.errors import ConfigError, ProtocolError
from hma_triton.messages import DIGEST_BYTES, MAX_CHUNKS

FINGERPRINT_VERSION = 1
_canonical = msgspec.msgpack.Encoder(order="deterministic")


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Engine settings that change cached bytes or their meaning and that no tensor shows.

    `kv_cache_dtype` is the engine's own string: two fp8 kinds both register as uint8.
    `overrides` holds rope and other model overrides; `extra` anything else that must not mix.
    """

    model_revision: str = ""
    quantization: str = ""
    kv_cache_dtype: str = "auto"
    overrides: dict[str, str] = {}
    dcp_size: int = 1
    dcp_interleave: int = 1
    attention_backend: str = ""
    edits: tuple[str, ...] = ()
    extra: dict[str, str] = {}

    def to_wire(self) -> dict[str, str]:
        """One flat map of strings; field values are JSON."""
        return {
            name: msgspec.json.encode(getattr(self, name), order="deterministic").decode()
            for name in self.__struct_fields__
        }

    @classmethod
    def from_wire(cls, facts: Mapping[str, str]) -> EngineFacts:
        """The inverse of `to_wire`. A name this version does not know is kept in `extra`.

        Raises:
            ConfigError: a value of the wrong kind; names the fact.
        """
        known: dict[str, Any] = {}
        unknown: dict[str, str] = {}
        for name, value in facts.items():
            if name not in cls.__struct_fields__:
                unknown[name] = value
                continue
            try:
                known[name] = msgspec.json.decode(value)
            except msgspec.DecodeError as error:
                raise ConfigError(f"engine fact {name!r}: {value[:80]!r} is no JSON") from error
        try:
            decoded = msgspec.convert(known, cls)
        except msgspec.ValidationError as error:
            raise ConfigError(f"engine facts: {error}") from error
        if not unknown:
            return decoded
        return msgspec.structs.replace(decoded, extra={**decoded.extra, **unknown})


class KernelGroupKey(msgspec.Struct, frozen=True, kw_only=True):
    """What the fingerprint sees of one kernel group: the identity, its layers, its rules.

    One format can lie in memory in several ways, and objects take over what lies there:
    `page_strides` are (slot, head) steps per plane, 0 along an axis of length 1, and `object_runs`
    say how rows, blocks and runs of each copy spec stand in an object.
    """

    layer_names: tuple[str, ...]
    kv_size: int
    num_heads: int
    head_size: int
    slots_per_block: int
    engine_group_idx: int
    dtype: str
    engine_kv_format: str
    tokens_per_block: int
    window_tokens: int | None
    recurrent: bool
    page_bytes: int
    page_strides: tuple[tuple[int, int], ...]
    object_runs: tuple[tuple[int, ...], ...]


class KeyFields(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that goes into the fingerprint (design rule 12); the rank is beside it."""

    model_name: str
    facts: EngineFacts
    world_size: int
    engine_type: str
    layout_hints: dict[str, str]
    layer_names: tuple[str, ...]
    kernel_groups: tuple[KernelGroupKey, ...]
    object_groups: tuple[tuple[int, ...], ...]
    replicated_object_groups: tuple[int, ...]
    object_nbytes: tuple[int, ...]
    object_layout: str
    chunk_tokens: int
    namespace: str = ""


def fingerprint(fields: KeyFields) -> bytes:
    """32 bytes that differ whenever any field differs."""
    encoded = _canonical.encode({"version": FINGERPRINT_VERSION, "fields": fields})
    return hashlib.sha256(encoded).digest()


def chunk_digests(
    tokens: Sequence[int] | npt.NDArray[np.integer], chunk_tokens: int, salt: str = ""
) -> bytes:
    """Packed digests of the whole chunks of `tokens`, chained from `salt`.

    The salt separates tenants: equal tokens under another salt have other digests. Tokens past the
    last whole chunk have none.

    Raises:
        ConfigError: `chunk_tokens` below one.
    """
    if chunk_tokens < 1:
        raise ConfigError(f"chunk_tokens {chunk_tokens} must be at least 1")
    ids = np.ascontiguousarray(tokens, dtype="<i8")
    link = hashlib.sha256(b"hma-triton/1/" + salt.encode()).digest()
    digests = []
    for start in range(0, len(ids) - chunk_tokens + 1, chunk_tokens):
        step = hashlib.sha256(link)
        step.update(ids[start : start + chunk_tokens].tobytes())
        link = step.digest()
        digests.append(link)
    return b"".join(digests)


def pack_digests(digests: bytes | Sequence[bytes]) -> bytes:
    """Digests of 16 to `DIGEST_BYTES` bytes each, padded with zeros; bytes are taken as packed.

    Raises:
        ProtocolError: a digest of another length, or too many.
    """
    if isinstance(digests, bytes):
        packed = digests
    else:
        for digest in digests:
            if not 16 <= len(digest) <= DIGEST_BYTES:
                raise ProtocolError(
                    f"a digest has {len(digest)} bytes; 16 to {DIGEST_BYTES} are needed"
                )
        packed = b"".join(digest.ljust(DIGEST_BYTES, b"\0") for digest in digests)
    if len(packed) % DIGEST_BYTES or len(packed) > MAX_CHUNKS * DIGEST_BYTES:
        raise ProtocolError(
            f"{len(packed)} bytes of digests: want a multiple of {DIGEST_BYTES}, "
            f"for at most {MAX_CHUNKS} chunks"
        )
    return packed
