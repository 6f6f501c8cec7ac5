"""The audit reads the tools' output rightly and fails when a claim is broken."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


def load_audit() -> ModuleType:
    spec = importlib.util.spec_from_file_location("audit", REPOSITORY / "tools" / "audit.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["audit"] = module
    spec.loader.exec_module(module)
    return module


audit = load_audit()

PTXAS = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z5cleanv' for 'sm_90'
ptxas info    : Function properties for _Z5cleanv
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 1024 bytes smem
ptxas info    : Compiling entry function '_Z5dirtyv' for 'sm_90'
ptxas info    : Function properties for _Z5dirtyv
    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 16 bytes cumulative stack size
"""

PTX = """\
.visible .entry _Z5cleanv(
	.param .align 8 .b8 _Z5cleanv_param_0[16]
)
.maxntid 128
.minnctapersm 3
{
	ret;
}
.visible .entry _Z5dirtyv()
.maxntid 32, 4, 2
{
	ret;
}
.visible .entry _Z5plainv()
{
"""

SASS = """\
	.section	.text._Z5cleanv,"ax",@progbits
        /*0000*/                   LDC R1, c[0x0][0x28] ;
.L_x_7:
        /*0010*/              @!P0 LDGSTS.E.BYPASS.LTC128B.128 [R2], desc[UR4][R4.64] ;
        /*0020*/                   LDSM.16.M88.4 R4, [R8+UR5] ;
        /*0030*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*0034*/                   FADD R4, R4, R5 ;
        /*0038*/               @P1 BRA `(.L_x_7) ;
        /*0040*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0050*/                   LDG.E R5, desc[UR4][R2.64] ;
        /*0060*/              @UP1 STG.E.128 desc[UR4][R2.64], R4 ;
	.section	.text._Z5dirtyv,"ax",@progbits
        /*0000*/                   STL.64 [R1], R2 ;
"""


def test_reads_ptxas() -> None:
    kernels = audit.read_ptxas(PTXAS, "sm_90")
    clean, dirty = kernels["_Z5cleanv"], kernels["_Z5dirtyv"]
    assert (clean.registers, clean.spill_nbytes, clean.static_shared) == (168, 0, 1024)
    assert (dirty.registers, dirty.spill_nbytes, dirty.stack_nbytes) == (255, 20, 16)


def test_reads_launch_bounds() -> None:
    assert audit.read_launch_bounds(PTX) == {"_Z5cleanv": 128, "_Z5dirtyv": 256}


def test_counts_instructions() -> None:
    counts = audit.count_instructions(SASS)
    once = ["async copy 16", "matrix load", "matrix product", "load 16", "store 16"]
    assert +counts["_Z5cleanv"] == {"instructions": 9, "loop": 5, **dict.fromkeys(once, 1)}
    assert counts["_Z5dirtyv"]["local memory"] == 1 and counts["_Z5dirtyv"]["loop"] == 0


def test_the_main_loop_is_the_shortest_that_copies_and_multiplies() -> None:
    copy, product = ("LDGSTS.E.BYPASS.LTC128B.128", ""), ("HMMA.16816.F32", "")
    back, label = ("BRA", " `(.L_x_1)"), ("", ".L_x_1")
    assert audit.main_loop([label, copy, product, back]) == 3
    assert audit.main_loop([label, copy, back]) == 0
    assert audit.main_loop([back, copy, product, label]) == 0, "a jump ahead is no loop"
    assert audit.main_loop([label, copy, product, ("BRA.DIV", " UR4, `(.L_x_1)")]) == 0
    outer = [("", ".L_x_0"), copy, label, copy, product, back, ("BRA", " `(.L_x_0)")]
    assert audit.main_loop(outer) == 3


@pytest.mark.parametrize(
    ("arch", "threads", "registers", "shared", "ctas"),
    [
        ("sm_90", 128, 168, 65616, 3),  # by both registers and shared memory
        ("sm_90", 128, 169, 0, 2),  # 176 registers after rounding
        ("sm_90", 128, 32, 0, 16),  # by threads
        ("sm_90", 32, 16, 0, 32),  # by the number of CTAs
        ("sm_80", 128, 64, 92144, 1),
        ("sm_80", 128, 64, 163 * 1024, 1),
        ("sm_80", 128, 64, 163 * 1024 + 1, 0),
        ("sm_90", 1024, 64, 0, 1),
        ("sm_90", 1056, 32, 0, 0),
        ("sm_90", 512, 255, 0, 0),
    ],
)
def test_occupancy(arch: str, threads: int, registers: int, shared: int, ctas: int) -> None:
    assert audit.ctas_per_multiprocessor(audit.CHIPS[arch], threads, registers, shared) == ctas


def test_demangles() -> None:
    names = audit.demangle(
        ["_ZN9paged_ops7kernels16attention_kernelINS0_7MmaTileINS_3f16ELi256ELi2EEELNS0_7RowCopyE1EEEvNS0_13AttentionArgsE",
         "_ZN9paged_ops7kernels17cu_seqlens_kernelENS_12GatherParamsE"]
    )  # fmt: skip
    assert list(names.values()) == [
        "attention_kernel<MmaTile<f16, 256, 2>, (RowCopy)1>",
        "cu_seqlens_kernel",
    ]


def test_reads_the_survey() -> None:
    lines = [
        '{"kernel": 4096, "threads": 128, "dynamic_shared": 1000}',
        '{"kernel": 4096, "threads": 128, "dynamic_shared": 2000}',
        '{"kernel": 4096, "ring": 800, "in_use": 200}',
        '{"kernel": 8192, "threads": 256, "dynamic_shared": 0}',
    ]
    symbols = """\
                 U memcpy
0000000000001000 W _ZN9paged_ops7kernels13gather_kernelI5uint4EEvNS_12GatherParamsE
0000000000002000 t _ZN9paged_ops7kernelsL17cu_seqlens_kernelENS_12GatherParamsE
"""
    survey = audit.read_survey(lines, symbols)
    assert survey["gather_kernel<uint4>"] == audit.Launches({(128, 1000), (128, 2000)}, 800, 200)
    assert survey["cu_seqlens_kernel"] == audit.Launches({(256, 0)})


CLAIM = audit.Claim("kernel", "a test", in_flight=1.5, instructions={"async copy 16": 2, "matrix product": 1})
KERNEL = audit.Kernel(
    "kernel", "sm_90", registers=168, max_threads=128,
    instructions=Counter({"async copy 16": 4, "matrix product": 4}),
)  # fmt: skip
LAUNCHES = audit.Launches({(128, 65616), (128, 60000)}, ring=65536, in_use=16384)


def failures(kernel: object = KERNEL, launches: object = LAUNCHES, name: str = "kernel") -> str:
    return "; ".join(audit.judge(kernel, name, launches, [CLAIM]).failures)


def test_good_kernel_passes() -> None:
    row = audit.judge(KERNEL, "kernel", LAUNCHES, [CLAIM])
    assert row.failures == [] and row.unchecked == []
    assert (row.threads, row.shared, row.ctas) == (128, 65616, 3)
    assert (row.computing, row.waiting) == (3 * 49152, 3 * 65536)


def test_each_broken_claim_is_told() -> None:
    assert "spills 4 bytes" in failures(replace(KERNEL, spill_nbytes=4))
    assert "bytes in flight" in failures(replace(KERNEL, registers=255, static_shared=60000))
    assert "bytes in flight" in failures(launches=replace(LAUNCHES, ring=32768))
    assert "does not fit" in failures(replace(KERNEL, arch="sm_120", static_shared=60000))
    assert "compiled for 64" in failures(replace(KERNEL, max_threads=64))
    assert "1 x async copy 16, wanted 2" in failures(
        replace(KERNEL, instructions=Counter({"async copy 16": 1, "matrix product": 1}))
    )
    loop = replace(CLAIM, max_loop=100)
    for count, good in ((100, True), (101, False), (0, False)):
        counted = replace(KERNEL, instructions=Counter({**KERNEL.instructions, "loop": count}))
        assert (audit.judge(counted, "kernel", LAUNCHES, [loop]).failures == []) is good
    assert "no claim" in failures(name="another")
    assert "saw no launch" in failures(launches=None)
    assert audit.unused_claims([], [CLAIM]) == ["kernel"]


def test_without_a_disassembler_claims_are_unchecked_not_broken() -> None:
    row = audit.judge(replace(KERNEL, instructions=None), "kernel", LAUNCHES, [CLAIM])
    assert row.failures == [] and row.unchecked == ["async copy 16", "matrix product"]


def test_bad_arguments_are_refused() -> None:
    command = [sys.executable, str(REPOSITORY / "tools" / "audit.py"), "--archs", "sm_35"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2 and "sm_35 is not one of sm_80" in result.stderr


@pytest.mark.skipif(audit.find_tool("nvcc") is None, reason="needs nvcc")
def test_the_kernels_keep_every_claim() -> None:
    folder = REPOSITORY / "build" / "audit"
    # Of kernels that differ in their types alone most are left to `make audit`, which takes minutes: each
    # type has its turn on sm_90, and one of them on sm_80.
    rows = audit.audit(["sm_90"], folder, r"(?!attention_(bf16_f8|f16_f8e5m2|f16_i8))")
    rows += audit.audit(["sm_80"], folder, r"(?!attention_(bf16|f16_))")
    assert len(rows) > 20
    assert [f"{row.kernel} on {row.arch}: {failure}" for row in rows for failure in row.failures] == []
    assert audit.unused_claims(rows) == []
