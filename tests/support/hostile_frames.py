"""Frames that no honest client sends: random, truncated, mutated, and well-formed lies."""

from __future__ import annotations

import random
from collections.abc import Iterator

import msgspec
import numpy as np
from support.server_pools import CHUNK_TOKENS, TestPool, prompt

from hma_triton import messages as m
from hma_triton.handles import ProcessRef
from hma_triton.process_identity import this_process
from hma_triton.tensor_ipc import export_kv_caches

_LIES = (0, 1, -1, 255, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), 1e308)
_HEADERS = (
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xdc\xff\xff",
    b"\xc1",
    b"\xc7\xff\x01",
)


class HostileFrames:
    """`templates` are honest messages of a registered client; frames are made from them."""

    def __init__(self, seed: int, pool: TestPool, instance: str) -> None:
        self.random = random.Random(seed)
        self.pool, self.instance = pool, instance
        self.templates = [m.encode(message) for message in self._honest()]

    def _honest(self) -> Iterator[m.Request]:
        storages, layers = export_kv_caches(self.pool.kv)
        digests = prompt(1, 3)
        ids = tuple(m.pack_block_ids(i) for i in self.pool.all_ids(3))
        yield m.Hello(seq=1, version=m.PROTOCOL_VERSION, process=this_process(), role="fuzz")
        yield m.RegisterKVCache(
            seq=2,
            instance_id=self.instance,
            storages=storages,
            kv_caches=layers,
            model_name="m",
            world_size=1,
            engine_type="vllm",
            layout_hints={"kv_layout": "HND"},
            engine_group_infos=tuple(self.pool.infos),
            chunk_tokens=CHUNK_TOKENS,
        )
        for _ in range(4):
            yield m.Lookup(
                seq=3,
                instance_id=self.instance,
                request_id="r",
                digests=digests,
                max_tokens=10**6,
            )
            yield m.Store(
                seq=4,
                instance_id=self.instance,
                rank=0,
                key=m.ChunkRange(start_chunk=0, digests=digests),
                block_ids=ids,
                deadline_ns=10**18,
            )
            yield m.Retrieve(
                seq=5,
                instance_id=self.instance,
                rank=0,
                request_id="r",
                digests=digests,
                skip_tokens=0,
                block_ids=ids,
                deadline_ns=10**18,
            )
        yield m.Release(seq=6, instance_id=self.instance, request_id="r")
        yield m.Abort(seq=7, target_seq=4)
        yield m.Ping(seq=8)
        yield m.Status(seq=9)
        yield m.Clear(seq=10, instance_id=self.instance)
        yield m.Unregister(seq=11, instance_id="somebody else")

    def frame(self) -> bytes:
        make = self.random.choice(
            (self._noise, self._truncated, self._mutated, self._mutated, self._spliced, self._lie)
        )
        return make()

    def _template(self) -> bytes:
        return self.random.choice(self.templates)

    def _noise(self) -> bytes:
        return self.random.randbytes(self.random.choice((0, 1, 2, 7, 33, 300)))

    def _truncated(self) -> bytes:
        whole = self._template()
        return whole[: self.random.randrange(len(whole))]

    def _mutated(self) -> bytes:
        frame = bytearray(self._template())
        for _ in range(self.random.choice((1, 1, 2, 5))):
            frame[self.random.randrange(len(frame))] = self.random.randrange(256)
        return bytes(frame)

    def _spliced(self) -> bytes:
        one, other = self._template(), self._template()
        cut = self.random.randrange(len(one))
        middle = self.random.choice((b"", self.random.choice(_HEADERS)))
        return one[:cut] + middle + other[self.random.randrange(len(other)) :]

    def _lie(self) -> bytes:
        """A well-formed message with one value that is not true, possible or of the right kind."""
        fields = msgspec.msgpack.decode(self._template())
        target, key = fields, self.random.choice(list(fields))
        while isinstance(target[key], (dict, list)) and target[key] and self.random.random() < 0.7:
            target = target[key]
            key = (
                self.random.choice(list(target))
                if isinstance(target, dict)
                else self.random.randrange(len(target))
            )
        target[key] = self.random.choice(
            (
                *_LIES,
                None,
                "",
                "x" * 600,
                "../../etc/passwd",
                b"",
                self.random.randbytes(33),
                np.arange(64, dtype="<i4").tobytes(),
                np.full(8, -5, dtype="<i4").tobytes(),
                [],
                [[]] * 70,
                {},
                {"a": {"b": []}},
                True,
            )
        )
        return msgspec.msgpack.encode(fields)


def foreign_process(**changes: object) -> ProcessRef:
    """This process, but for what is changed."""
    return msgspec.structs.replace(this_process(), **changes)
