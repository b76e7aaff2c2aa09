"""One call of a whole FLUX transformer with random weights: dense, refresh and sparse steps.

The baseline is the stock transformer in the same process: same weights and inputs, cuDNN attention,
compiled blocks. Random weights say nothing about quality; that the patched transformer computes the
same model is checked on its dense steps.
"""

from __future__ import annotations

import math
import statistics
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import chipsparse
from benchmarks.cases import CASES, Case
from benchmarks.kernel_profile import kernel_table
from benchmarks.kernel_runs import at_most
from benchmarks.random_inputs import generator_on
from benchmarks.records import Record, environment
from benchmarks.run import Run
from benchmarks.sampled_checks import check_finite, relative_error, require
from chipsparse.profiles.profile import find_profile

MODEL = "FluxTransformer2DModel"
# Text tokens, then rows and columns of image tokens.
SHAPES = {"flux_1280x768": (512, 48, 80)}
COLUMNS = {
    "op": "",
    "case": "",
    "backend": "",
    "attention_kept": ".3f",
    "mlp_kept": ".3f",
    "latency_ms": ".2f",
    "baseline_ms": ".2f",
    "speedup": ".2f",
    "dense_ms": ".2f",
    "refresh_ms": ".2f",
    "host_ms": ".2f",
    "graphs": "d",
    "graph_breaks": "d",
    "rel_error": ".1e",
    "sparse_error": ".1e",
    "reused_error": ".1e",
    "peak_bytes": ".3e",
}

# Timed calls of each action; the baseline is timed as often as all of them together.
FULL_CALLS, SPARSE_CALLS = 3, 10
# Two more sparse calls follow them: the host's share and the profile.
MORE_CALLS = 2
WARM_UP_CALLS = 3
# How far the latents move per step, in their own deviation.
DRIFT = 0.05
# Deviation of the biases that scale, shift and gate: the blocks then have a say in the output, as
# in a trained model, and the hidden states stay of order one.
MODULATION = 0.2
# Largest relative error of a dense or refresh step: the model's own rounding, in another order.
DENSE_LIMIT = {torch.bfloat16: 5e-2, torch.float16: 1e-2, torch.float32: 1e-4}
# Passed to ``compile_repeated_blocks``.
COMPILE_OPTIONS: dict[str, Any] = {}

Call = Callable[[], torch.Tensor]


def add_arguments(parser: ArgumentParser) -> None:
    """Options of this benchmark alone; ``--tokens`` and ``--heads`` are those of the kernels."""
    group = parser.add_argument_group("transformer_step")
    group.add_argument("--layers", type=int, help="at most so many blocks of a kind, for a dry run")
    group.add_argument("--profile", type=Path, help="write the kernels of one sparse step here")


@dataclass(frozen=True)
class Shape:
    """Tokens of a call: text, then an image of rows and columns."""

    text: int
    rows: int
    columns: int

    @classmethod
    def of(cls, case: Case) -> Shape:
        """The shape of a named case; that of a scaled one has about the same proportions."""
        text, rows, columns = SHAPES[case.name.split()[0]]
        share = case.tokens / (text + rows * columns)
        if share >= 1:
            return cls(text, rows, columns)
        text, rows = max(1, int(text * share)), max(1, int(rows * math.sqrt(share)))
        return cls(text, rows, max(1, (case.tokens - text) // rows))

    @property
    def image(self) -> int:
        return self.rows * self.columns


class Inputs:
    """Arguments of the transformer's forward at every step: latents that move a little each time.

    Args:
        shape: tokens of a call.
        config: of the transformer.
        steps: how many steps there are.
        device: where the tensors are.
        dtype: of the latents and the prompt.
    """

    def __init__(
        self, shape: Shape, config: Any, steps: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        generator = generator_on(device, 1)

        def normal(*sizes: int) -> torch.Tensor:
            return torch.randn(sizes, generator=generator, device=device, dtype=dtype)

        moves = DRIFT * normal(steps, shape.image, config.in_channels)
        self._latents = normal(shape.image, config.in_channels) + moves.cumsum(0)
        self._timesteps = torch.linspace(1, 0, steps + 1, device=device, dtype=dtype)
        row = torch.arange(shape.image, device=device)
        places = [row * 0, row // shape.columns, row % shape.columns]
        self._constant = {
            "encoder_hidden_states": normal(1, shape.text, config.joint_attention_dim),
            "pooled_projections": normal(1, config.pooled_projection_dim),
            "guidance": torch.full((1,), 3.5, device=device),
            "img_ids": torch.stack(places, dim=1).to(dtype),
            "txt_ids": torch.zeros(shape.text, 3, device=device, dtype=dtype),
            "return_dict": False,
        }

    def __getitem__(self, step: int) -> dict[str, Any]:
        return self._constant | {
            "hidden_states": self._latents[step, None],
            "timestep": self._timesteps[step, None],
            "joint_attention_kwargs": {},  # the model takes entries out of it
        }


def make_transformer(
    case: Case, layers: int | None, device: torch.device, dtype: torch.dtype
) -> Any:
    """FLUX.1-dev with random weights, made where it runs; the same at every call."""
    from diffusers import FluxTransformer2DModel

    before = torch.get_default_dtype()
    devices = [device] if device.type == "cuda" else []
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device), torch.random.fork_rng(devices), torch.no_grad():
            torch.manual_seed(0)
            transformer = FluxTransformer2DModel(
                num_layers=min(19, layers or 19),
                num_single_layers=min(38, layers or 38),
                num_attention_heads=case.heads,
                attention_head_dim=case.head_dim,
                guidance_embeds=True,
            ).eval()
            for name, parameter in transformer.named_parameters():
                if name.endswith(("norm.linear.bias", "norm1.linear.bias", "context.linear.bias")):
                    parameter.normal_(0, MODULATION)
    finally:
        torch.set_default_dtype(before)
    return transformer.requires_grad_(False)


def run(args: Namespace, device: torch.device, dtype: torch.dtype, to: Run) -> None:
    """Adds one record per case."""
    for name in args.case.split(",") if args.case else SHAPES:
        with to.attempt(f"transformer_step, {name}"):
            if name not in SHAPES:
                raise ValueError(f"no transformer for the case {name!r}; there are {list(SHAPES)}")
            case = at_most(CASES[name], args.tokens, args.heads)
            record, table = measure(case, args.layers, device, dtype, profile=bool(args.profile))
            to.add(record)
            if args.profile is not None:
                args.profile.write_text(table + "\n", encoding="utf-8")
            # After the record is written: the times tell what went wrong.
            if record["fallbacks"]:
                raise ValueError("not everything ran sparse: " + "; ".join(record["fallbacks"]))
            require("relative error", record["rel_error"], DENSE_LIMIT[dtype], "dense steps")
        if device.type == "cuda":
            torch.cuda.empty_cache()


def measure(
    case: Case, layers: int | None, device: torch.device, dtype: torch.dtype, *, profile: bool
) -> tuple[Record, str]:
    """The record of a case, and the table of the kernels of a sparse step, empty without profile.

    Raises:
        WrongResultError: an output is not finite.
        ValueError: a step did something else than the schedule says.
    """
    shape = Shape.of(case)
    transformer = make_transformer(case, layers, device, dtype)
    timed = 2 * FULL_CALLS + SPARSE_CALLS
    inputs = Inputs(shape, transformer.config, timed + MORE_CALLS, device, dtype)
    attention = "_native_cudnn" if device.type == "cuda" else "native"
    with attention_backend(transformer, attention), torch.no_grad():
        stock = measure_stock(transformer, inputs, timed, device)
        patched, table = measure_patched(transformer, inputs, case, device, profile=profile)
    expected, outputs = stock.pop("outputs"), patched.pop("outputs")
    for output in (*expected, *outputs):
        check_finite(output)
    errors = [relative_error(*pair) for pair in zip(outputs, expected, strict=True)]
    config = transformer.config
    record = {
        "op": "transformer_step",
        "case": case.name,
        "batch": 1,
        "heads": case.heads,
        "head_dim": case.head_dim,
        "tokens": shape.text + shape.image,
        "text_tokens": shape.text,
        "layers": [config.num_layers, config.num_single_layers],
        "dtype": str(dtype).removeprefix("torch."),
        "backend": "chipsparse",
        "baseline": f"stock transformer, {attention.lstrip('_')} attention, compiled blocks",
        **patched,
        **{f"baseline_{name}": value for name, value in stock.items()},
        "speedup": stock["ms"] / patched["latency_ms"],
        "timed_by": "events" if device.type == "cuda" else "clock",
        "calls": {"baseline": timed, "full": FULL_CALLS, "sparse": SPARSE_CALLS},
        "rel_error": max(errors[: 2 * FULL_CALLS]),
        "sparse_error": errors[-1],
        # What reusing the refresh's output would have cost on the same step.
        "reused_error": relative_error(outputs[2 * FULL_CALLS - 1], expected[-1]),
        **environment(device),
    }
    return record, table


def measure_stock(
    transformer: Any, inputs: Inputs, timed: int, device: torch.device
) -> dict[str, Any]:
    """Time, graphs and peak memory of the stock transformer, and its outputs at all steps."""
    calls = [lambda step=step: transformer(**inputs[step])[0] for step in range(timed)]
    with compiled_blocks(transformer) as graphs:
        for call in calls[:WARM_UP_CALLS]:
            call()
        with peak_of(device) as peak:
            times, outputs = run_timed(calls, device)
    return {"ms": statistics.median(times), "outputs": outputs, **graphs, **peak}


def measure_patched(
    transformer: Any, inputs: Inputs, case: Case, device: torch.device, *, profile: bool
) -> tuple[dict[str, Any], str]:
    """As `measure_stock` for each action of the patched transformer."""
    full, timed = FULL_CALLS, 2 * FULL_CALLS + SPARSE_CALLS
    actions = ["dense"] * full + ["refresh"] * full + ["sparse"] * (SPARSE_CALLS + MORE_CALLS)
    config = (
        find_profile(None, MODEL)
        .qualities["published"]
        .override(
            {
                "attention.density": case.density,
                "mlp.density": case.mlp_density,
                "schedule.actions": actions,
            }
        )
    )
    pipe = SimpleNamespace(components={"transformer": transformer}, scheduler=None)

    def call(step: int) -> torch.Tensor:
        with transformer.cache_context("cond", step_index=step, num_inference_steps=len(actions)):
            output: torch.Tensor = transformer(**inputs[step])[0]
        return output

    calls = [lambda step=step: call(step) for step in range(len(actions))]
    with chipsparse.enable(pipe, config) as handle, compiled_blocks(transformer) as graphs:
        for step in (0, full, 2 * full, 2 * full + 1):  # compiles, tunes, picks dense kernels
            call(step)
        with peak_of(device) as peak:  # from step 0: another generation, with caches of its own
            times, outputs = run_timed(calls[:timed], device)
        host_ms = until_return(calls[timed], device)
        report = handle.report
        report.layer_times = profile  # so that kernels are launched one by one
        table = kernel_table(calls[timed + 1], device) if profile else ""
    did = [record.action.value for record in report.steps]
    if did != actions[: len(did)]:
        raise ValueError(f"the schedule was {actions}, but the steps were {did}")
    result = {
        "latency_ms": statistics.median(times[2 * full :]),
        "dense_ms": statistics.median(times[:full]),
        "refresh_ms": statistics.median(times[full : 2 * full]),
        "host_ms": host_ms,
        "attention_kept": report.steps[timed - 1].attention_kept,
        "mlp_kept": report.steps[timed - 1].mlp_kept,
        "backends": dict(report.backends),
        "fallbacks": list(report.fallbacks),
        "cache_bytes": report.cache_bytes,
        "outputs": outputs,
        **graphs,
        **peak,
    }
    return result, table


@contextmanager
def attention_backend(transformer: Any, name: str) -> Iterator[None]:
    """Sets diffusers' attention backend of a model; the one of the process is restored."""
    from diffusers.models import attention_dispatch

    with attention_dispatch.attention_backend(name):
        transformer.set_attention_backend(name)
        yield


@contextmanager
def compiled_blocks(transformer: Any) -> Iterator[dict[str, int]]:
    """Compiles the blocks anew; the dictionary has the graphs and graph breaks in the end."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    transformer.compile_repeated_blocks(**COMPILE_OPTIONS)
    found: dict[str, int] = {}
    yield found
    found["graphs"] = counters["stats"]["unique_graphs"]
    found["graph_breaks"] = sum(counters["graph_break"].values())


@contextmanager
def peak_of(device: torch.device) -> Iterator[dict[str, int | None]]:
    """The dictionary has the most bytes that were allocated at once in the end, None on a CPU."""
    found: dict[str, int | None] = {"peak_bytes": None}
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    yield found
    if device.type == "cuda":
        found["peak_bytes"] = torch.cuda.max_memory_allocated(device)


def run_timed(
    calls: Sequence[Call], device: torch.device
) -> tuple[list[float], list[torch.Tensor]]:
    """One time in ms and one output per call, in order. The host runs ahead of a GPU, as it may."""
    outputs, marks = [], []
    for call in calls:
        marks.append(_mark(device))
        outputs.append(call())
        marks.append(_mark(device))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        times = [a.elapsed_time(b) for a, b in zip(marks[::2], marks[1::2], strict=True)]
    else:
        times = [(b - a) * 1e3 for a, b in zip(marks[::2], marks[1::2], strict=True)]
    return times, outputs


def _mark(device: torch.device) -> Any:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def until_return(call: Call, device: torch.device) -> float:
    """Time in ms until a call returns on an idle device: where it is the longer, the host limits.

    Includes waits for room in the launch queue, so it is at most about the time of the call.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3
