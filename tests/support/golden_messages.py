"""One example of every message. `python -m support.golden_messages` (in tests/) writes the files.

A golden file changes only with the protocol's version: an older peer must still understand it.
"""

from __future__ import annotations

from pathlib import Path

from hma_triton import messages as m
from hma_triton.group_view import EngineGroupInfo
from hma_triton.handles import (
    CpuEventHandle,
    CudaEventHandle,
    CudaIpcHandle,
    LayerHandle,
    ProcessRef,
    ShmHandle,
    TensorHandle,
)

FOLDER = Path(__file__).parents[1] / "unit" / "golden_messages"
_PROCESS = ProcessRef(
    pid=4242,
    start_ticks=123456,
    pid_namespace=4026531836,
    boot_id="b007",
    time_namespace=4026531834,
)
_SHM = ShmHandle(owner=_PROCESS, fd=7, nbytes=1 << 20, device=27, inode=38)
_DIGESTS = bytes(range(64))

EXAMPLES: tuple[m.Request | m.Reply, ...] = (
    m.Hello(seq=1, version=1, process=_PROCESS, role="rank 0"),
    m.Goodbye(seq=2),
    m.RegisterKVCache(
        seq=3,
        instance_id="engine-1",
        storages=(
            _SHM,
            CudaIpcHandle(
                owner=_PROCESS, device_uuid="GPU-1", handle=b"h" * 64, offset_bytes=512, nbytes=4096
            ),
        ),
        kv_caches=(
            LayerHandle(
                name="layers.0",
                tensors=(
                    TensorHandle(
                        storage=0,
                        dtype="bfloat16",
                        shape=(9, 2, 16, 128),
                        strides=(8192, 128, 256, 1),
                        offset=64,
                    ),
                ),
            ),
        ),
        model_name="m",
        world_size=2,
        engine_type="vllm",
        layout_hints={"kv_layout": "HND"},
        engine_group_infos=(EngineGroupInfo(0, (0,), 16, 128, 1, False),),
        rank=1,
        namespace="tenant",
        chunk_tokens=512,
        null_block_id=0,
        facts={"kv_cache_dtype": '"fp8_e4m3"'},
        replicated_infos=(0,),
        separate_object_groups=True,
    ),
    m.Unregister(seq=4, instance_id="engine-1", rank=1),
    m.Lookup(seq=5, instance_id="engine-1", request_id="r1", digests=_DIGESTS, max_tokens=1023),
    m.Store(
        seq=6,
        instance_id="engine-1",
        rank=1,
        key=m.ChunkRange(start_chunk=3, digests=_DIGESTS, parent=b"p" * 32),
        block_ids=(m.pack_block_ids([1, 2, 0, -1]), m.pack_block_ids([])),
        deadline_ns=10**15,
        event=CpuEventHandle(segment=_SHM, offset_bytes=8, value=3),
    ),
    m.Retrieve(
        seq=7,
        instance_id="engine-1",
        rank=1,
        request_id="r1",
        digests=_DIGESTS,
        skip_tokens=256,
        block_ids=(m.pack_block_ids([5, 6]),),
        deadline_ns=10**15,
        event=CudaEventHandle(owner=_PROCESS, device_uuid="GPU-1", handle=b"e" * 64),
    ),
    m.Release(seq=8, instance_id="engine-1", request_id="r1"),
    m.Abort(seq=9, target_seq=7),
    m.Ping(seq=10),
    m.Status(seq=11),
    m.Clear(seq=12, instance_id="engine-1"),
    m.HelloReply(seq=1, version=1, process=_PROCESS, server_id="s1", lease_s=60.0),
    m.RegisterReply(
        seq=3,
        object_nbytes=(4096, 320),
        chunk_tokens=512,
        fingerprint="f0",
        ranks=2,
        backend="cpu-compiled",
    ),
    m.Done(seq=8, count=1),
    m.LookupReply(
        seq=5,
        request_id="r1",
        tokens=512,
        chunks=1,
        reason="chunk 1 missing in object group 0",
    ),
    m.StoreReply(seq=6, stored=4, skipped=1, nbytes=4096, seconds=0.5, code="", message=""),
    m.RetrieveReply(
        seq=7, request_id="r1", ok=False, nbytes=0, seconds=0.0, code="missing", message="gone"
    ),
    m.AbortReply(seq=9, target_seq=7, state="ended"),
    m.Pong(seq=10, server_id="s1", monotonic_ns=10**15),
    m.StatusReply(seq=11, json=b'{"pid":1}'),
    m.ErrorReply(seq=12, code="unknown_instance", message="not registered"),
)


def tag_of(message: m.Request | m.Reply) -> str:
    return str(message.__struct_config__.tag)


def file_of(message: m.Request | m.Reply) -> Path:
    return FOLDER / f"{tag_of(message)}.hex"


def write() -> None:
    FOLDER.mkdir(exist_ok=True)
    for message in EXAMPLES:
        text = m.encode(message).hex()
        lines = [text[start : start + 96] for start in range(0, len(text), 96)]
        file_of(message).write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    write()
