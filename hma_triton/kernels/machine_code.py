"""What a compiled copy kernel really does: widths of its data accesses, registers, spills.

Read from NVIDIA's disassembly (`nvdisasm -g`, `cuobjdump -res-usage`) and from the AMD assembly
with its metadata. Both carry source lines, which tell data accesses from loads of ids and tables.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from hma_triton.kernels.specialize import KernelSpecialization

REGISTER_LIMIT = 64

_CUDA_LINE = re.compile(r'//## File "(?P<file>[^"]+)", line (?P<line>\d+)')
_CUDA_INSTRUCTION = re.compile(
    r"/\*(?P<at>[0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?(?P<op>[A-Z][A-Z0-9_]*(?:\.[A-Za-z0-9_]+)*)"
)
_CUDA_INSTRUCTION_BYTES = 16
_CUDA_LOADS = frozenset({"LDG", "LD", "LDGSTS"})
_CUDA_STORES = frozenset({"STG", "ST"})
_CUDA_LOCAL = frozenset({"LDL", "STL"})
_CUDA_WIDTHS = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16, "256": 32}
_CUDA_USAGE = re.compile(r"REG:(?P<registers>\d+)\s+STACK:(?P<stack>\d+)")

_AMD_LINE = re.compile(r"^\s*\.loc\s+(?P<file>\d+)\s+(?P<line>\d+)")
_AMD_FILE = re.compile(r'^\s*\.file\s+(?P<index>\d+)\s+(?:"[^"]*"\s+)?"(?P<name>[^"]+)"')
_AMD_ACCESS = re.compile(
    r"^\s*(?P<space>global|flat|buffer|scratch)_(?P<kind>load|store)_(?P<type>\w+)"
)
_AMD_WIDTHS = {
    **{f"dword{suffix}": 4 * n for suffix, n in (("", 1), ("x2", 2), ("x3", 3), ("x4", 4))},
    **{f"b{bits}": bits // 8 for bits in (8, 16, 32, 64, 96, 128)},
    **dict.fromkeys(("ubyte", "sbyte", "byte", "ubyte_d16", "byte_d16"), 1),
    **dict.fromkeys(("ushort", "sshort", "short", "short_d16", "ushort_d16"), 2),
}
_AMD_COUNT = r"\.{}:\s+(\d+)"


@dataclass(frozen=True, slots=True)
class SourceLines:
    """The lines of the function that moves data: accesses elsewhere are ids, tables or spills."""

    file_name: str
    first: int
    last: int

    def hold(self, file: str, line: int) -> bool:
        """Whether `line` of `file` moves data."""
        return file.rsplit("/", 1)[-1] == self.file_name and self.first <= line <= self.last


@dataclass(frozen=True, slots=True)
class MachineCode:
    """One compiled kernel. Widths are bytes of an access, one entry for each instruction.

    `registers` are a thread's (AMD: vector and accumulation registers); `spill_bytes` is the
    stack a thread needs; `stray_stores` are writes outside the data lines, of which there are none.
    """

    load_bytes: tuple[int, ...]
    store_bytes: tuple[int, ...]
    other_loads: int
    stray_stores: int
    registers: int
    spill_bytes: int
    spill_instructions: int
    code_bytes: int
    compile_seconds: float = 0.0
    missed: tuple[str, ...] = field(default=())


def missed_marks(special: KernelSpecialization, code: MachineCode) -> tuple[str, ...]:
    """Which marks `code` misses: width where alignment permits, no spills, registers."""
    found = []
    allowed = {special.tail_word_bytes} if special.tail_words else set()
    for name, widths in (("load", code.load_bytes), ("store", code.store_bytes)):
        wide = [width for width in widths if width not in allowed or width >= special.word_bytes]
        if not wide:
            found.append(f"no data {name} of {special.word_bytes} bytes was found")
        elif min(wide) < special.word_bytes:
            found.append(f"a data {name} of {min(wide)} bytes where {special.word_bytes} fit")
    if code.stray_stores:
        found.append(f"{code.stray_stores} stores that move no data")
    if code.spill_bytes or code.spill_instructions:
        found.append(f"{code.spill_bytes} bytes spilled by {code.spill_instructions} instructions")
    if code.registers > REGISTER_LIMIT:
        found.append(f"{code.registers} registers, the limit is {REGISTER_LIMIT}")
    return tuple(found)


def read_cuda(sass: str, usage: str, data_lines: SourceLines) -> MachineCode:
    """From `nvdisasm -g` and `cuobjdump -res-usage` of one cubin with one kernel."""
    accesses = list(_cuda_accesses(sass, data_lines))
    counts = _CUDA_USAGE.search(usage)
    if counts is None:
        raise ValueError("cuobjdump -res-usage names no registers")
    ends = [int(match["at"], 16) for match in _CUDA_INSTRUCTION.finditer(sass)]
    return _summary(
        accesses,
        registers=int(counts["registers"]),
        spill_bytes=int(counts["stack"]),
        code_bytes=max(ends, default=-_CUDA_INSTRUCTION_BYTES) + _CUDA_INSTRUCTION_BYTES,
    )


def read_amd(assembly: str, data_lines: SourceLines) -> MachineCode:
    """From the AMD assembly of one kernel, metadata included."""

    def count(name: str) -> int:
        match = re.search(_AMD_COUNT.format(name), assembly)
        if match is None:
            raise ValueError(f"the AMD metadata has no .{name}")
        return int(match[1])

    length = re.search(r"codeLenInByte\s*=\s*(\d+)", assembly)
    # a spilled scalar register takes a lane of a vector register: no memory, yet a miss
    spilled = count("vgpr_spill_count") + count("sgpr_spill_count")
    return _summary(
        list(_amd_accesses(assembly, data_lines)),
        registers=count("vgpr_count") + count("agpr_count"),
        spill_bytes=max(count("private_segment_fixed_size"), 4 * spilled),
        code_bytes=int(length[1]) if length else 0,
    )


@dataclass(frozen=True, slots=True)
class _Access:
    kind: str
    width: int
    moves_data: bool


def _summary(
    accesses: Iterable[_Access], *, registers: int, spill_bytes: int, code_bytes: int
) -> MachineCode:
    seen = list(accesses)

    def widths(kind: str) -> tuple[int, ...]:
        return tuple(a.width for a in seen if a.kind == kind and a.moves_data)

    def others(kind: str) -> int:
        return sum(a.kind == kind and not a.moves_data for a in seen)

    return MachineCode(
        load_bytes=widths("load"),
        store_bytes=widths("store"),
        other_loads=others("load"),
        stray_stores=others("store"),
        registers=registers,
        spill_bytes=spill_bytes,
        spill_instructions=sum(a.kind == "local" for a in seen),
        code_bytes=code_bytes,
    )


def _cuda_accesses(sass: str, data_lines: SourceLines) -> Iterator[_Access]:
    moves_data = False
    for text in sass.splitlines():
        place = _CUDA_LINE.search(text)
        if place:
            moves_data = data_lines.hold(place["file"], int(place["line"]))
            continue
        instruction = _CUDA_INSTRUCTION.search(text)
        if instruction is None:
            continue
        name, *modifiers = instruction["op"].split(".")
        if name in _CUDA_LOCAL:
            yield _Access("local", 4, False)
        elif name in _CUDA_LOADS or name in _CUDA_STORES:
            width = next((_CUDA_WIDTHS[m] for m in modifiers if m in _CUDA_WIDTHS), 4)
            yield _Access("load" if name in _CUDA_LOADS else "store", width, moves_data)


def _amd_accesses(assembly: str, data_lines: SourceLines) -> Iterator[_Access]:
    files: dict[str, str] = {}
    moves_data = False
    for text in assembly.splitlines():
        named = _AMD_FILE.match(text)
        if named:
            files[named["index"]] = named["name"]
            continue
        place = _AMD_LINE.match(text)
        if place:
            moves_data = data_lines.hold(files.get(place["file"], ""), int(place["line"]))
            continue
        access = _AMD_ACCESS.match(text)
        if access is None:
            continue
        if access["space"] == "scratch":
            yield _Access("local", 4, False)
        else:
            yield _Access(access["kind"], _AMD_WIDTHS[access["type"]], moves_data)
