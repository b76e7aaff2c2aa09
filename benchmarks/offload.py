"""Steps of a transformer whose caches live in host memory, against the same with all on the GPU.

The transformer is the least that the caches see of one: per layer the projections, self-attention
and, with ``--mlp``, a sparse feed-forward layer (else a dense one), with one set of random weights
for all layers. Norms, modulation and cross-attention would only give copies more time to hide.
"""

from __future__ import annotations

import statistics
from argparse import ArgumentParser, Namespace
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.cases import CASES, Case
from benchmarks.kernel_runs import at_most
from benchmarks.records import Record, environment
from benchmarks.run import Run
from benchmarks.sampled_checks import check_finite
from chipsparse import SparsityConfig
from chipsparse.cache.host_memory import HostMemory
from chipsparse.cache.memory_plan import MemoryDemand
from chipsparse.cache.offload import OffloadPool
from chipsparse.experiments.timing import time_call
from chipsparse.kernels.mask_packing import packed_to_indices
from chipsparse.layers.mlp_weights import MLPWeights
from chipsparse.layout import LayerKind, ModelLayout
from chipsparse.report.generation import GenerationReport
from chipsparse.session import Session
from chipsparse.step import StepContext

# Layers of the models whose shapes the cases have.
LAYERS = {"hunyuan_720p": 60, "wan14b_720p": 40, "wan1b_480p": 30}
COLUMNS = {
    "op": "",
    "case": "",
    "backend": "",
    "layers": "d",
    "mlp": "",
    "latency_ms": ".2f",
    "baseline_ms": ".2f",
    "slowdown": ".4f",
    "mask_slots_bytes": ".4e",
    "residual_slots_bytes": ".4e",
    "host_bytes": ".4e",
    "pinned_share": ".4f",
    "to_device_bytes": ".3e",
    "unpack_share": ".4f",
    "identical": "",
}
ACTIONS = ["dense", "refresh"]
SPARSE_STEPS = 6  # the first warms up
DRIFT = 0.05


def add_arguments(parser: ArgumentParser) -> None:
    """Options of this benchmark alone; ``--tokens`` and ``--heads`` are those of the kernels."""
    group = parser.add_argument_group("offload")
    group.add_argument("--layers", type=int, help="at most so many, for a dry run")
    group.add_argument("--mlp", action="store_true", help="with sparse feed-forward layers")


def run(args: Namespace, device: torch.device, dtype: torch.dtype, to: Run) -> None:
    """Adds one record per case."""
    for name in args.case.split(",") if args.case else ("hunyuan_720p", "wan1b_480p"):
        with to.attempt(f"offload, {name}"):
            if name not in LAYERS:
                raise ValueError(f"no transformer for the case {name!r}; there are {list(LAYERS)}")
            case = at_most(CASES[name], args.tokens, args.heads)
            layers = min(LAYERS[name], args.layers or LAYERS[name])
            rows = int(args.block_size.split(",")[0])
            record = measure(case, layers, device, dtype, sparse_mlp=args.mlp, rows=rows)
            to.add(record)
            if not record["identical"]:
                raise ValueError("the outputs differ from those with all caches on the device")


def measure(
    case: Case,
    layers: int,
    device: torch.device,
    dtype: torch.dtype,
    *,
    sparse_mlp: bool,
    rows: int = 128,
) -> Record:
    """The record of a case."""
    model = Model(case, layers, device, dtype)
    config = SparsityConfig().override(
        {
            "attention.density": case.density,
            "attention.block_size_q": rows,
            "mlp.density": case.mlp_density,
            "mlp.enabled": sparse_mlp,
            "schedule.actions": [*ACTIONS, *["sparse"] * SPARSE_STEPS],
        }
    )
    resident = generate(model, config.override({"memory.offload": "never"}))
    hosted = generate(model, config.override({"memory.offload": "always"}))
    layout = model.layout
    step_ms = statistics.median(hosted["times"][1:])
    baseline_ms = statistics.median(resident["times"][1:])
    payload = hosted["host_bytes"]
    return {
        "op": "offload",
        "case": case.name,
        "batch": case.batch,
        "heads": case.heads,
        "head_dim": case.head_dim,
        "tokens": layout.tokens,
        "layers": layers,
        "dtype": str(dtype).removeprefix("torch."),
        "density": case.density,
        "block_size": rows,
        "mlp": "sparse" if sparse_mlp else "dense",
        "backend": "host memory",
        "baseline": "all caches on the device",
        "latency_ms": step_ms,
        "baseline_ms": baseline_ms,
        "speedup": baseline_ms / step_ms,
        "slowdown": step_ms / baseline_ms,
        "step_ms": hosted["times"],
        "baseline_step_ms": resident["times"],
        "refresh_ms": hosted["refresh_ms"],
        "baseline_refresh_ms": resident["refresh_ms"],
        "mask_slots_bytes": 2 * hosted["slots"].get("columns", 0),
        "residual_slots_bytes": 2 * hosted["slots"].get("residual", 0),
        "slots_bytes": 2 * sum(hosted["slots"].values()),
        "host_bytes": payload,
        "pinned_bytes": hosted["pinned_bytes"],
        "pinned_share": hosted["allocated_bytes"] / payload,
        "to_device_bytes": hosted["to_device"],
        "to_host_bytes": hosted["to_host"],
        "peak_gpu_bytes": hosted["peak"],
        "baseline_peak_gpu_bytes": resident["peak"],
        "unpack_ms": hosted["unpack_ms"],
        "unpack_share": layers * hosted["unpack_ms"] / step_ms,
        "fallbacks": hosted["fallbacks"],
        "identical": hosted["sums"] == resident["sums"],
        "rel_error": 0.0 if hosted["sums"] == resident["sums"] else None,
        "timed_by": "events" if device.type == "cuda" else "clock",
        **environment(device),
    }


def layout_of(case: Case, layers: int) -> ModelLayout:
    """So many blocks with the shapes of a case."""
    kind, grid = LayerKind("block", layers, case.mlp_width), (1, 1, case.tokens)
    return ModelLayout((kind,), case.heads, case.head_dim, case.batch, (grid,))


class Model:
    """Layers with the shapes of a case and random weights, the same ones in every layer."""

    def __init__(self, case: Case, layers: int, device: torch.device, dtype: torch.dtype) -> None:
        self.case, self.device, self.dtype = case, device, dtype
        self.layout = layout_of(case, layers)
        self._generator = torch.Generator(device).manual_seed(0)
        channels = case.heads * case.head_dim  # of a scaled case as well
        self._project_in = self._normal(3 * channels, channels) * channels**-0.5
        self._project_out = self._normal(channels, channels) * channels**-0.5
        self._mlp = MLPWeights(
            self._normal(case.mlp_width, channels) * channels**-0.5,
            None,
            (self._normal(case.mlp_width, channels) * case.mlp_width**-0.5).t(),
            None,
            "gelu-tanh",
        )
        self._noise = self._normal(case.batch, case.tokens, channels)
        self._drift = self._normal(case.batch, case.tokens, channels) * DRIFT

    def _normal(self, *sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=self._generator, device=self.device, dtype=self.dtype)

    def __call__(self, session: Session, step: int) -> torch.Tensor:
        """One call."""
        hidden = self._noise + step * self._drift
        for layer in range(self.layout.layers):
            hidden = self._block(session, layer, hidden)
        return hidden

    def _block(self, session: Session, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        case = self.case
        normed = F.rms_norm(hidden, hidden.shape[-1:])
        joined = F.linear(normed, self._project_in).unflatten(-1, (3, case.heads, case.head_dim))
        query, key, value = (joined[:, :, i].transpose(1, 2) for i in range(3))
        attended = session.attention[layer](
            session.state, query, key, value, scale=None, unpatched=lambda *_: _fail("ran dense")
        )
        attended = attended.transpose(1, 2).flatten(2)
        hidden = hidden + F.linear(attended, self._project_out)
        normed = F.rms_norm(hidden, hidden.shape[-1:])
        return hidden + session.mlp[layer](session.state, normed, self._mlp)


def generate(model: Model, config: SparsityConfig) -> dict[str, Any]:
    """Runs the schedule once: times of the sparse steps, checksums of all outputs, memory."""
    device, report = model.device, GenerationReport()
    memory = HostMemory()
    pool = OffloadPool(memory, report.fall_back)
    session = Session(config, report, pool)
    steps = len(config.schedule.actions or ())
    sums = []
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with torch.no_grad():
        for step in range(steps):
            # One more step than there are: caches are freed after the last.
            context = StepContext(1, step, "cond", steps + 1)
            session.begin(context, model.layout, device, lambda: MemoryDemand(model.dtype))
            output = model(session, step)
            session.end(output)
            check_finite(output)
            sums.append(checksum(output))
        times = [record.seconds * 1e3 for record in report.steps]
        columns = stored_columns(session)
        result = {
            "sums": sums,
            "times": times[len(ACTIONS) :],
            "refresh_ms": times[1],
            "slots": pool.slots,
            "host_bytes": report.host_bytes,
            "allocated_bytes": memory.nbytes,
            "pinned_bytes": memory.pinned_bytes,
            "to_device": report.steps[-1].bytes_to_device,
            "to_host": report.steps[-1].bytes_to_host,
            "unpack_ms": unpack_ms(columns, session, model),
            "peak": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
            "fallbacks": list(report.fallbacks),
        }
        del columns
    session.close()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return result


def stored_columns(session: Session) -> torch.Tensor:
    """The packed columns of the first layer, a copy."""
    with session._caches.acquire("cond", 0, "attention", frozenset({"columns"})) as cache:
        assert cache.columns is not None
        return cache.columns.clone()


def unpack_ms(columns: torch.Tensor, session: Session, model: Model) -> float:
    """Time in ms to make one layer's lists of its packed columns."""
    capacity = session._caches["cond", 0].attention.capacity

    def unpack() -> Any:
        return packed_to_indices(columns, model.layout.tokens, capacity=capacity)

    return time_call(unpack, model.device).latency_ms


def checksum(tensor: torch.Tensor) -> int:
    """A number that every bit of a tensor has a say in, and its place too."""
    words = tensor.contiguous().view(torch.int16 if tensor.itemsize == 2 else torch.int32)
    place = torch.arange(1, words.shape[-1] + 1, device=tensor.device)
    return int((words.long() * place).sum())


def _fail(message: str) -> torch.Tensor:
    raise AssertionError(message)
