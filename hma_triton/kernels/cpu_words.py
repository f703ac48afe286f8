"""Machine words for the compiled CPU copy: moves of fixed length, prefetch, counter and fence.

numba's own array code neither promises wide accesses nor writes past the cache, so these four
are given to LLVM directly. All addresses are int64. Vectors are 64 bytes wide at most; LLVM
splits them where the machine's are narrower, on every architecture.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

LINE_BYTES = 64

_INT8 = ir.IntType(8)
_INT32 = ir.IntType(32)
_INT64 = ir.IntType(64)
# pieces loaded before the first is stored: keeps many loads in flight, fits the vector registers
_PIECES_IN_FLIGHT = 8


def _pieces(nbytes: int) -> list[tuple[int, int]]:
    """(offset, width) of the widest words that tile `nbytes` exactly."""
    pieces = []
    offset = 0
    for width in (64, 32, 16, 8, 4, 2, 1):
        while nbytes - offset >= width:
            pieces.append((offset, width))
            offset += width
    return pieces


def _word(width: int) -> Any:
    return ir.VectorType(_INT8, width) if width > 8 else ir.IntType(8 * width)


def _load(builder: Any, address: Any, offset: int, width: int) -> Any:
    place = builder.add(address, _INT64(offset))
    value = builder.load(builder.inttoptr(place, _word(width).as_pointer()))
    value.align = 1
    return value


def _store(builder: Any, value: Any, address: Any, offset: int, past_cache: bool) -> None:
    place = builder.add(address, _INT64(offset))
    store = builder.store(value, builder.inttoptr(place, value.type.as_pointer()))
    store.align = LINE_BYTES if past_cache else 1
    if past_cache:
        store.set_metadata("nontemporal", builder.module.add_metadata([_INT32(1)]))


def _copy_bytes(_typing: Any, _destination: Any, _source: Any, nbytes: Any, past_cache: Any) -> Any:
    """Typing and code of `copy_bytes`."""
    length, nontemporal = nbytes.literal_value, past_cache.literal_value
    if nontemporal and length % LINE_BYTES:
        raise ValueError(f"a copy past the cache moves whole lines of 64 bytes, got {length}")

    def code(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        pieces = _pieces(length)
        for first in range(0, len(pieces), _PIECES_IN_FLIGHT):
            batch = pieces[first : first + _PIECES_IN_FLIGHT]
            values = [_load(builder, args[1], offset, width) for offset, width in batch]
            for value, (offset, _) in zip(values, batch, strict=True):
                _store(builder, value, args[0], offset, nontemporal)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, nbytes, past_cache), code


def _join_line(
    _typing: Any, _destination: Any, _source: Any, _stride: Any, run_bytes: Any, past_cache: Any
) -> Any:
    """Typing and code of `join_line`."""
    width, nontemporal = run_bytes.literal_value, past_cache.literal_value
    if LINE_BYTES % width or width < 8:
        raise ValueError(f"a line is joined from runs of 8, 16 or 32 bytes, got {width}")

    def code(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        destination, address, stride = args[0], args[1], args[2]
        parts = []
        for _ in range(LINE_BYTES // width):
            place = builder.inttoptr(address, ir.VectorType(_INT8, width).as_pointer())
            value = builder.load(place)
            value.align = 1
            parts.append(value)
            address = builder.add(address, stride)
        while len(parts) > 1:
            lanes = 2 * parts[0].type.count
            mask = ir.Constant(ir.VectorType(_INT32, lanes), list(range(lanes)))
            parts = [
                builder.shuffle_vector(parts[i], parts[i + 1], mask)
                for i in range(0, len(parts), 2)
            ]
        _store(builder, parts[0], destination, 0, nontemporal)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, run_bytes, past_cache), code


def _prefetch_line(_typing: Any, _address: Any) -> Any:
    """Typing and code of `prefetch_line`."""

    def code(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        pointer = _INT8.as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [pointer, _INT32, _INT32, _INT32])
        function = builder.module.globals.get("llvm.prefetch.p0")
        if function is None:
            function = ir.Function(builder.module, kind, "llvm.prefetch.p0")
        read, keep, data = _INT32(0), _INT32(3), _INT32(1)
        builder.call(function, [builder.inttoptr(args[0], pointer), read, keep, data])
        return context.get_dummy_value()

    return types.void(types.int64), code


def _take(_typing: Any, _counter: Any, _count: Any) -> Any:
    """Typing and code of `take`."""

    def code(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        place = builder.inttoptr(args[0], _INT64.as_pointer())
        return builder.atomic_rmw("add", place, args[1], "monotonic")

    return types.int64(types.int64, types.int64), code


def _fence(_typing: Any) -> Any:
    """Typing and code of `fence`."""

    def code(context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), code


# copy_bytes(destination, source, nbytes, past_cache): moves the literal `nbytes`. With the
# literal `past_cache` the stores bypass the cache and `destination` must be a multiple of 64.
copy_bytes = intrinsic(prefer_literal=True)(_copy_bytes)

# join_line(destination, source, stride, run_bytes, past_cache): writes one line of 64 bytes from
# 64 / run_bytes runs that lie `stride` apart.
join_line = intrinsic(prefer_literal=True)(_join_line)

# prefetch_line(address): asks for one line; never faults, whatever the address.
prefetch_line = intrinsic(_prefetch_line)

# take(counter, count): adds to the int64 at `counter`, atomically; gives the value before.
take = intrinsic(_take)

# fence(): orders every earlier store, those past the cache too, before every later one.
fence = intrinsic(_fence)
