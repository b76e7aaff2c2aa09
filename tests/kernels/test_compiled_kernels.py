"""The kernels compiled for GPUs that need not be there: what fits, and what spills where.

They are compiled in other processes, which have no TRITON_INTERPRET to replace them.
"""

import inspect
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

pytest.importorskip("triton")

from triton.runtime.jit import JITFunction

from benchmarks.compile_report import SHARED_BYTES, Instruction, hot_loops, instructions
from benchmarks.compiled_cases import cases
from benchmarks.records import read
from tests.kernels.formulas import INTERPRETED

ROOT = Path(__file__).parents[2]
PRODUCTS_OF_8_BITS = {89: {"IMMA", "QMMA"}, 90: {"IGMMA", "QGMMA"}, 100: {"UTCIMMA", "UTCQMMA"}}
PRODUCTS_OF_16_BITS = {90: {"HGMMA"}, 80: {"HMMA"}}


@pytest.mark.skipif(INTERPRETED, reason="the interpreter replaces the kernels")
def test_every_kernel_is_launched_by_a_case(monkeypatch):
    monkeypatch.setattr(JITFunction, "_do_compile", lambda *_: None)
    launched = {kernel for case in cases() for kernel, _ in case.compile()}
    kernels = {
        kernel
        for path in (ROOT / "kernels").glob("*/*.py")
        if path.stem in ("triton_kernel", "gluon_sm90")
        for name, kernel in inspect.getmembers(
            import_module(f"chipsparse.kernels.{path.parent.name}.{path.stem}"),
            lambda member: isinstance(member, JITFunction),
        )
        if name.endswith("_kernel")
    }
    assert len(kernels) > 20
    assert {kernel.__name__ for kernel in kernels - launched} == set()


def compiled(path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.compile_report", "--json", str(path)]
    options = {"capture_output": True, "text": True, "timeout": 1800}
    done = subprocess.run(command, cwd=ROOT, env=environment, check=False, **options)
    if done.returncode == 2:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr[-4000:]
    reports = read(path)
    assert reports
    return {" ".join(str(value) for value in [*item.values()][:5]): item for item in reports}


@pytest.mark.slow
def test_all_kernels_use_what_the_gpu_has_and_none_spills_in_a_hot_loop(tmp_path):
    reports = compiled(tmp_path / "all.json")
    backends = {(item["operation"], item["backend"]) for item in reports.values()}
    backends |= {(item["variant"].split()[0], item["backend"]) for item in reports.values()}
    of_attention = ("column_sparse_attention", "dense_attention_column_sums", "in_8_bits")
    for operation in (*of_attention, "sparse_mlp_up", "sparse_mlp_down"):
        assert {(operation, "gluon_sm90"), (operation, "triton_kernel")} <= backends
    assert ("neuron_selection", "triton_kernel") in backends
    for name, item in reports.items():
        check_what_it_uses(name, item)


def check_what_it_uses(name, item):
    smallest = 99 << 10 if item["capability"] == 80 else SHARED_BYTES  # also of the smaller cards
    assert item["shared_bytes"] <= smallest, name
    gluon = item["backend"] == "gluon_sm90"
    kernel = item["kernel"]
    attention = kernel.endswith(("attention", "column_sums"))
    if attention or kernel in ("sparse_mlp_up", "sparse_mlp_down", "product"):
        in_8_bits = item["variant"].startswith("in_8_bits")
        products = PRODUCTS_OF_8_BITS if in_8_bits else PRODUCTS_OF_16_BITS
        for instruction in products[item["capability"]]:
            assert item[instruction] > 0, name
        assert item["hot_loops"] > 0, name  # or spills would be looked for nowhere
    if gluon:
        gathers = not item["operation"].removeprefix("fp8_").startswith("dense_attention")
        assert item["LDGSTS" if gathers else "UTMALDG"] > 0, name
        assert item["hot_loops"] >= 2, name  # one that copies and one that multiplies
    # The MLP's Gluon kernels for ragged sizes, which run only when asked for, read back one or two
    # words per stage (benchmarks/notes/sparse_mlp.md).
    few = "gluon_sm90" in name and "even=False" in name
    assert item["hot_stores"] == 0, name
    assert item["hot_loads"] <= (4 if few else 0), name
    # Tokens move together whatever their count, of which the compiler knows nothing.
    assert not kernel.startswith("sparse_mlp") or item["single_stores"] == 0, name
    # The first layer also loads biases.
    assert kernel != "sparse_mlp_down" or item["single_loads"] == 0, name


CODE = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;    /* 0x0000000000000000 */
        /*0010*/                   STL [R1], R0 ;            /* 0x0000000000000000 */
        /*0020*/                   SYNCS.PHASECHK R2 ;       /* 0x0000000000000000 */
        /*0030*/              @!P0 BRA 0xa0 ;                /* 0x0000000000000000 */
        /*0040*/                   HGMMA.64x128x16.F32 R24 ; /* 0x0000000000000000 */
        /*0050*/                   LDL R2, [R1] ;            /* 0x0000000000000000 */
        /*0060*/               @P1 BRA 0x20 ;                /* 0x0000000000000000 */
        /*0070*/                   LDL.LU R3, [R1+0x10] ;    /* 0x0000000000000000 */
        /*0080*/           @P2 BRA.U 0x10 ;                  /* 0x0000000000000000 */
        /*0090*/                   EXIT ;                    /* 0x0000000000000000 */
        /*00a0*/                   NANOSLEEP 0x1 ;           /* 0x0000000000000000 */
        /*00b0*/              @!P0 BRA 0xa0 ;                /* 0x0000000000000000 */
        /*00c0*/                   BRA 0x40 ;                /* 0x0000000000000000 */
        /*00d0*/                   BRA 0xd0;                 /* 0x0000000000000000 */
"""


def test_the_hot_loop_of_a_listing_is_the_innermost_that_multiplies():
    """The wait stands behind the code: its way back into the loop is no loop of its own."""
    code = instructions(CODE)
    assert len(code) == 14
    assert code[2] == Instruction(0x20, "SYNCS", None, False)
    assert code[3] == Instruction(0x30, "BRA", 0xA0, True)
    assert code[12] == Instruction(0xC0, "BRA", 0x40, False)
    (loop,) = hot_loops(code)
    assert [line.address for line in loop] == [0x20, 0x30, 0x40, 0x50, 0x60]


def test_without_matrix_products_loops_that_load_are_hot():
    code = instructions(CODE.replace("HGMMA.64x128x16.F32 R24", "LDG.E R24, [R2.64]"))
    assert [len(loop) for loop in hot_loops(code)] == [5]
    assert hot_loops(instructions(CODE.replace("HGMMA.64x128x16.F32", "FADD"))) == []
