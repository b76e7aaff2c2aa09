"""Runs the tests of the Triton kernels under Triton's interpreter, so that any machine tests them.

The interpreter has to be asked for before the kernels are imported, so this takes other processes.
"""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# The longest first.
OPERATIONS = [
    "dense_attention_column_sums",
    "column_selection",
    "column_sparse_attention",
    "neuron_selection",
    "sparse_mlp_down",
    "sparse_mlp_up",
    "mask_packing",
    "merge_residual",
]


def run(operation):
    options = ["-q", "-k", "triton", "-m", "not gpu and not slow", "-p", "no:cacheprovider"]
    return subprocess.run(
        [sys.executable, "-m", "pytest", f"tests/kernels/test_{operation}.py", *options],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )


@pytest.fixture(scope="module")
def runs():
    """All of them, two at a time."""
    pool = ThreadPoolExecutor(min(2, os.cpu_count() or 1))
    yield {operation: pool.submit(run, operation) for operation in OPERATIONS}
    pool.shutdown(cancel_futures=True)


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("operation", OPERATIONS)
def test_triton_kernels_under_the_interpreter(operation, runs):
    done = runs[operation].result()
    tail = "\n".join(done.stdout.splitlines()[-60:])
    assert done.returncode == 0, tail
    assert " passed" in tail, tail  # not everything skipped
