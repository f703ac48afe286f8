"""Reading machine code: accesses of every kind, spills and counts, from what the tools print."""

from __future__ import annotations

import pytest

from hma_triton.kernels.addressing import Direction
from hma_triton.kernels.machine_code import (
    MachineCode,
    SourceLines,
    missed_marks,
    read_amd,
    read_cuda,
)
from hma_triton.kernels.specialize import KernelSpecialization

LINES = SourceLines("block_copy.py", 43, 49)
USAGE = " Function _block_copy_kernel:\n  REG:40 STACK:0 SHARED:0 LOCAL:0 CONSTANT[0]:624\n"
SPECIAL = KernelSpecialization(Direction.STORE, 5, 1, 1, 36, 16, 8, 0, 0, False, 64, 1, 1)

SASS = """
\t//## File "/somewhere/block_copy.py", line 126
        /*0780*/                   LDG.E.64 R16, desc[UR24][R16.64] ;
\t//## File "/somewhere/block_copy.py", line 47 inlined at "/somewhere/block_copy.py", line 145
        /*0790*/              @!P0 LDG.E.EF.128 R8, desc[UR14][R20.64] ;
        /*07a0*/                   IMAD.MOV.U32 R14, RZ, RZ, R44 ;
        /*07b0*/             @!UP0 STG.E.EF.128 desc[UR14][R40.64], R8 ;
\t//## File "/somewhere/other.py", line 47
        /*07c0*/                   LDG.E R3, desc[UR24][R16.64] ;
\t//## File "/somewhere/block_copy.py", line 49
"""

AMD = """
\t.file\t1 "/somewhere/kernels" "block_copy.py"
\t.file\t2 "/somewhere" "other.py"
\t.loc\t1 126 21                        ; block_copy.py:126:21
\tbuffer_load_dwordx2 v[16:17], v6, s[12:15], 0 offen
\t.loc\t1 47 23 is_stmt 0               ; block_copy.py:47:23
\tglobal_load_dwordx4 v[4:7], v[2:3], off
\tglobal_store_dwordx4 v[12:13], v[4:7], off
\t.loc\t2 47 1
\tglobal_load_dwordx2 v[4:5], v[2:3], off
; codeLenInByte = 1188
    .agpr_count:     {agpr}
    .private_segment_fixed_size: {private}
    .sgpr_count:     34
    .sgpr_spill_count: {sgpr_spill}
    .vgpr_count:     20
    .vgpr_spill_count: {vgpr_spill}
"""


def amd(**counts: int) -> str:
    zero = {"agpr": 0, "private": 0, "sgpr_spill": 0, "vgpr_spill": 0}
    return AMD.format(**{**zero, **counts})


def test_cuda_data_and_tables_are_told_apart() -> None:
    code = read_cuda(SASS, USAGE, LINES)
    assert code == MachineCode((16,), (16,), 2, 0, 40, 0, 0, 0x7C0 + 16)
    assert missed_marks(SPECIAL, code) == ()


@pytest.mark.parametrize(
    ("instruction", "width"),
    [
        ("LDG.E.EF.U8 R1", 1),
        ("LDG.E.S8 R1", 1),
        ("LDG.E.U16 R1", 2),
        ("LDG.E R1", 4),
        ("LDG.E.CONSTANT R1", 4),
        ("LDG.E.64.STRONG.GPU R1", 8),
        ("LDG.E.128 R1", 16),
        ("LDGSTS.E.BYPASS.128 R1", 16),
        ("LDG.E.ENL2.256 R1", 32),
    ],
)
def test_cuda_widths(instruction: str, width: int) -> None:
    text = f'\t//## File "x/block_copy.py", line 45\n        /*0010*/   {instruction} ;\n'
    assert read_cuda(text, USAGE, LINES).load_bytes == (width,)


def test_cuda_spills_and_stray_stores() -> None:
    sass = SASS + (
        "        /*07d0*/                   STL [R1+0x4], R3 ;\n"
        "        /*07e0*/                   LDL.64 R4, [R1] ;\n"
        '\t//## File "x/block_copy.py", line 130\n'
        "        /*07f0*/                   STG.E desc[UR14][R40.64], R8 ;\n"
    )
    code = read_cuda(sass, USAGE.replace("STACK:0", "STACK:8").replace("40", "72"), LINES)
    assert (code.spill_bytes, code.spill_instructions, code.stray_stores) == (8, 2, 1)
    assert missed_marks(SPECIAL, code) == (
        "1 stores that move no data",
        "8 bytes spilled by 2 instructions",
        "72 registers, the limit is 64",
    )


def test_cuda_without_counts() -> None:
    with pytest.raises(ValueError, match="names no registers"):
        read_cuda(SASS, "", LINES)


def test_amd_data_and_tables_are_told_apart() -> None:
    code = read_amd(amd(), LINES)
    assert code == MachineCode((16,), (16,), 2, 0, 20, 0, 0, 1188)
    assert missed_marks(SPECIAL, code) == ()


@pytest.mark.parametrize(
    ("kind", "width"),
    [
        ("global_load_ubyte", 1),
        ("global_load_ushort", 2),
        ("flat_load_dword", 4),
        ("buffer_load_dwordx2", 8),
        ("global_load_dwordx3", 12),
        ("global_load_b128", 16),
    ],
)
def test_amd_widths(kind: str, width: int) -> None:
    text = amd().replace("global_load_dwordx4", kind)
    assert read_amd(text, LINES).load_bytes == (width,)


@pytest.mark.parametrize(
    ("counts", "spill_bytes"),
    [({"vgpr_spill": 3}, 12), ({"sgpr_spill": 2}, 8), ({"private": 64, "vgpr_spill": 1}, 64)],
)
def test_amd_spills(counts: dict[str, int], spill_bytes: int) -> None:
    text = amd(**counts).replace(
        "\t.loc\t2 47 1\n", "\tscratch_store_dword off, v1, s0\n\t.loc\t2 47 1\n"
    )
    code = read_amd(text, LINES)
    assert (code.spill_bytes, code.spill_instructions) == (spill_bytes, 1)
    assert missed_marks(SPECIAL, code) == (f"{spill_bytes} bytes spilled by 1 instructions",)


def test_amd_accumulation_registers_count() -> None:
    code = read_amd(amd(agpr=48), LINES)
    assert missed_marks(SPECIAL, code) == ("68 registers, the limit is 64",)


def test_amd_without_metadata() -> None:
    with pytest.raises(ValueError, match=r"no \.vgpr_spill_count"):
        read_amd("", LINES)


def test_accesses_may_be_wider_but_not_absent() -> None:
    wide = MachineCode((32, 16), (32,), 3, 0, 40, 0, 0, 100)
    assert missed_marks(SPECIAL, wide) == ()
    blind = MachineCode((), (16,), 3, 0, 40, 0, 0, 100)
    assert missed_marks(SPECIAL, blind) == ("no data load of 16 bytes was found",)


def test_only_the_tail_may_be_narrow() -> None:
    tailed = KernelSpecialization(Direction.STORE, 5, 1, 1, 8, 16, 8, 3, 1, False, 64, 1, 1)
    code = MachineCode((16, 1), (16, 1), 3, 0, 40, 0, 0, 100)
    assert missed_marks(tailed, code) == ()
    assert missed_marks(SPECIAL, code) == (
        "a data load of 1 bytes where 16 fit",
        "a data store of 1 bytes where 16 fit",
    )
    only_tail = MachineCode((1,), (16, 1), 3, 0, 40, 0, 0, 100)
    assert missed_marks(tailed, only_tail) == ("no data load of 16 bytes was found",)
