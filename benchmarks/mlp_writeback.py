"""Where the sparse MLP writes its cached activations back: in the first product's epilogue, as the
kernels do, or beside the second product, on multiprocessors of its own.

For the second way the Gluon kernel of the first product runs without the one line that stores the
new activations, and a Triton kernel adds their change to the cache while the second product runs on
the other multiprocessors. It rounds once more, so it is measured here and used nowhere.
"""

from __future__ import annotations

import importlib.util
import inspect
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.attention_ops import Settings
from benchmarks.case_tensors import CaseTensors
from benchmarks.cases import CASES
from benchmarks.kernel_runs import at_most
from benchmarks.mlp_ops import ACTIVATION, Layer, down, make_layer, up
from benchmarks.records import Record, environment
from benchmarks.run import Run
from benchmarks.sampled_checks import relative_error, require
from chipsparse.kernels import triton_support
from chipsparse.kernels.sparse_mlp_up import SparseMLPUp
from chipsparse.kernels.token_layout import empty_token_contiguous
from chipsparse.measure.timing import time_call

STORE = "    gl.store(cached, new, mask=stored)\n"
MULTIPROCESSORS = (8, 16, 24, 32)  # for the write-back; the second product has the others
BLOCK_SIZE = 128
CACHE_LIMIT = 2e-2  # a second rounding of the change
COLUMNS = {
    "op": "",
    "case": "",
    "variant": "",
    "multiprocessors": "d",
    "latency_ms": ".4f",
    "baseline_ms": ".4f",
    "speedup": ".3f",
    "timed_by": "",
}


def write_back(layer: Layer, delta: torch.Tensor, programs: int) -> None:
    """Adds ``delta`` ``[B, N, K]`` to the cached activations of the listed neurons."""
    # Imported here so that other benchmarks run where there is no Triton.
    from benchmarks.write_back_kernel import ENTRIES, write_back_kernel

    batch, blocks, capacity = layer.neurons.shape
    items = batch * blocks * -(-capacity // ENTRIES)
    write_back_kernel[(min(items, programs),)](
        layer.activation,
        delta,
        layer.neurons,
        items,
        blocks,
        capacity,
        layer.hidden.shape[1],
        layer.activation.stride(0),
        layer.activation.stride(2),
        delta.stride(0),
        delta.stride(2),
        ENTRIES=ENTRIES,
        ROWS=BLOCK_SIZE,
    )


def without_write_back(folder: Path) -> Any:
    """The Gluon module of the first product without the line that stores the activations.

    Raises:
        ValueError: the module has not exactly one such line.
    """
    from chipsparse.kernels.sparse_mlp_up import gluon_sm90

    source = inspect.getsource(gluon_sm90)
    if source.count(STORE) != 1:
        raise ValueError(f"expected one line {STORE.strip()!r}, found {source.count(STORE)}")
    path = folder / "sparse_mlp_up_without_write_back.py"
    path.write_text(source.replace(STORE, ""), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextmanager
def fewer_multiprocessors(taken: int) -> Iterator[None]:
    """Kernels that ask for the number of multiprocessors are told of so many less."""
    real = triton_support.multiprocessors
    triton_support.multiprocessors = lambda device: real(device) - taken
    try:
        yield
    finally:
        triton_support.multiprocessors = real


def run(args: Namespace, device: torch.device, dtype: torch.dtype, to: Run) -> None:
    """Adds the records of both ways; needs a GPU that runs the Gluon kernels."""
    for name in args.case.split(",") if args.case else ("flux_1280x768",):
        with to.attempt(f"mlp_writeback, {name}"), tempfile.TemporaryDirectory() as folder:
            case = at_most(CASES[name], args.tokens, args.heads)
            tensors = CaseTensors(case, device, dtype)
            to.add(*measure(tensors, without_write_back(Path(folder))))


def measure(tensors: CaseTensors, module: Any) -> list[Record]:
    """The records of a case; the way in the epilogue is the baseline of the others.

    Raises:
        WrongResultError: the cache beside the second product differs by more than a rounding.
    """
    device = tensors.device
    layer = make_layer(tensors, Settings(block_size=BLOCK_SIZE))
    # Not a clone: that of rows with gaps between them has other strides.
    activation = empty_token_contiguous(layer.hidden, *layer.activation.shape)
    activation.copy_(layer.activation)
    other = replace(layer, activation=activation, output=layer.output.clone())
    beside = torch.cuda.Stream(device)

    def up_only(layer: Layer = layer) -> torch.Tensor:
        call = SparseMLPUp(
            layer.hidden,
            layer.up,
            layer.up_bias,
            layer.neurons,
            layer.activation,
            activation=ACTIVATION,
            block_size=BLOCK_SIZE,
        )
        delta: torch.Tensor = module.sparse_mlp_up(call)
        return delta

    delta = up_only(other)
    write_back(other, delta, triton_support.multiprocessors(device))
    up(layer, layer.neurons, "gluon")
    error = relative_error(other.activation, layer.activation)
    require("cached activations", error, CACHE_LIMIT, "beside the second product")

    def both(taken: int) -> torch.Tensor:
        current = torch.cuda.current_stream(device)
        beside.wait_stream(current)
        with torch.cuda.stream(beside):
            write_back(layer, delta, taken)
        with fewer_multiprocessors(taken):
            output = down(layer, delta, layer.neurons, "gluon")
        current.wait_stream(beside)
        return output

    def epilogue() -> torch.Tensor:
        return down(layer, up(layer, layer.neurons, "gluon"), layer.neurons, "gluon")

    def ways(taken: int) -> torch.Tensor:
        up_only()
        return both(taken)

    variants: list[tuple[str, int, Callable[[], Any]]] = [
        ("in the epilogue: both products", 0, epilogue),
        ("first product", 0, lambda: up(layer, layer.neurons, "gluon")),
        ("first product without write-back", 0, up_only),
        ("second product", 0, lambda: down(layer, delta, layer.neurons, "gluon")),
    ]
    for taken in MULTIPROCESSORS:
        variants += [
            ("write-back alone", taken, lambda t=taken: write_back(layer, delta, t)),
            ("second product beside the write-back", taken, lambda t=taken: both(t)),
            ("beside the second product: both products", taken, lambda t=taken: ways(t)),
        ]
    records: list[Record] = []
    for name, taken, call in variants:
        timing = time_call(call, device)
        baseline = records[0]["latency_ms"] if records else timing.latency_ms
        records.append(
            {
                "op": "mlp_writeback",
                "case": tensors.case.name,
                "backend": "gluon",
                "variant": name,
                "multiprocessors": taken,
                "tokens": layer.hidden.shape[1],
                "dtype": str(tensors.dtype).removeprefix("torch."),
                "latency_ms": timing.latency_ms,
                "baseline": "in the epilogue: both products",
                "baseline_ms": baseline,
                "speedup": baseline / timing.latency_ms,
                "rel_error": error,
                "timed_by": timing.method,
                **environment(device),
            }
        )
    return records
