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
# The longest first; of each, tests of small tensors that run in a few seconds.
OPERATIONS = {
    "dense_attention_column_sums": "any_scale_and_the_layout",
    "column_selection": "special_rows and row9 or keeps_the and 1337-0.01",
    "column_sparse_attention": (
        "laid_out_like or nan_and_infinity and nan-False or nan_in_a_mean and 64"
        " or residual_is_added and fp8 and True-dtype1"
    ),
    "neuron_selection": "ties_nan_and_repeats and dtype1",
    "sparse_mlp_down": (
        "no_neurons_change_nothing or neuron_by_neuron and 7-dtype1 or from_slots"
        " or is_not_seen and 7-17"
    ),
    "sparse_mlp_up": (
        "views_of_larger_tensors or poison_leaves and dtype1 or is_not_seen and False-7"
        " or cannot_hold or in_fp8 and 128-True-7"
    ),
    "mask_packing": "packs_like_bitarray or padding_bits or to_the_capacity",
    "fp8_dense_attention": "small_weights",
    "fp8_quantization": "zeros_and_equal_rows",
    "fp8_dequantization": "every_number and dtype1",
    "fp8_rows": "each_row and dtype1 or not_finite",
    "piece_copies": "nothing or (in_their_places and dtype0)",
}
FILES = [f"tests/kernels/test_{operation}.py" for operation in OPERATIONS]
GENERATION = "tests/regression/test_backends.py"

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


def run(files, selected):
    options = ["-q", "-p", "no:cacheprovider", "-k", selected, "-m", "not gpu and not slow", "-rA"]
    command = [sys.executable, "-m", "pytest", *options, *files]
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.run(command, cwd=ROOT, env=env, timeout=900, check=False, **output)


def check(done, files):
    tail = "\n".join(done.stdout.splitlines()[-60:])
    assert done.returncode == 0, tail
    for file in files:  # none of them skipped altogether
        assert f"PASSED {file}" in done.stdout, tail


def test_some_tests_of_every_triton_kernel():
    done = run(FILES, f"triton and ({' or '.join(OPERATIONS.values())})")
    check(done, FILES)


@pytest.fixture(scope="module")
def runs():
    """All of them, and a whole generation by these kernels, two at a time."""
    pool = ThreadPoolExecutor(min(2, os.cpu_count() or 1))
    yield {file: pool.submit(run, [file], "triton") for file in (*FILES, GENERATION)}
    pool.shutdown(cancel_futures=True)


@pytest.mark.slow
@pytest.mark.parametrize("file", [*FILES, GENERATION])
def test_all_tests_of_a_triton_kernel(file, runs):
    check(runs[file].result(), [file])
