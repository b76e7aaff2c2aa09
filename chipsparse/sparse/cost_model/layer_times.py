"""The times of a transformer's layers, and what of them pays: from sizes and rates alone.

A layer's time is the sum of

- attention: ``4 N^2 C`` operations, or the kept share of them, slowed by what the sparse kernel
  does not reach;
- the projections around it, ``2 N C^2`` each, and the feed-forward layer, ``4 N C F`` or the kept
  share of it, slowed likewise (C is the width of the hidden states, or that of all heads);
- the elementwise work between them: `ELEMENTWISE_PASSES` times the bytes of the hidden states.

Left out: attention to a prompt beside the sequence, and the embeddings. For all layers of
FLUX.1-dev at 1280x768 on an H200 it gives 126, 144 and 78 ms dense, at a refresh and sparse;
measured were 126, 145 and 76 (benchmarks/results/full_size_fp8_h200.json).

A part of a layer pays if its sparse step saves enough of a dense one in any case: `PartSeconds`.
Small layers take longer than their operations, so floors and fixed times are added, and what the
host takes to launch kernels where it launches them. Fitted to the cases of
benchmarks/results/attention_curve_h200.json and sparse_mlp_h200.json, all of which stay sparse.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch

from chipsparse.common.machine import device_name
from chipsparse.config import PARTS, Action, Part, SparsityConfig
from chipsparse.kernels.checks import block_count
from chipsparse.layout import Fp8Form
from chipsparse.sparse.plan import SparsityPlan

# Reads and writes of tensors as large as the hidden states, in a block compiled by PyTorch:
# what a dense step of FLUX.1-dev takes beyond its attention and linears.
ELEMENTWISE_PASSES = 66
# To make queries, keys and values 8 bits wide: the latter two are read twice, all are written at
# half. That is 6.5, at three quarters of the memory's rate.
FP8_PASSES = 8.5

# The share of a dense step that a sparse one must save: less is lost to refreshes, or is noise.
LEAST_GAIN = 0.05
# What the mean columns of the rule `means` cost, as a share of all columns: 22 % of the time of a
# kernel with 10 % of 118,784 columns (H100).
MEANS_SHARE = 0.022
# Seconds of a sparse step beside its operations: kernels that begin and end, lists, scores.
SPARSE_SECONDS: Mapping[Part, float] = {"attention": 55e-6, "mlp": 90e-6}
# A sparse step takes at most this many times its estimate, and so many seconds more: heads of 64
# channels and narrow MLPs are slower than the rates say.
MOST: Mapping[Part, float] = {"attention": 1.15, "mlp": 1.0}
MOST_SECONDS = 60e-6
# Seconds that a slow host takes to launch a sparse step: 5 kernels of attention, 7 of an MLP.
HOST_SECONDS: Mapping[Part, float] = {"attention": 250e-6, "mlp": 450e-6}
READING_SECONDS = 10e-6  # of a sparse step with weights in FP8, besides: two kernels read them
GATHER_RATE = 5e12  # bytes a second that blocks of rows gather, mostly from the L2 cache
# Passes over the kept neurons (old and new activations, changes) and over the layer's output.
NEURON_PASSES = 4
OUTPUT_PASSES = 3

CALLS_BEFORE = 1  # sparse calls of a branch before one is captured: the first may compile
CAPTURE_CALLS = 1.5  # that a capture takes of the host: 119 ms where a step of FLUX.1 takes 85


@dataclass(frozen=True)
class Rates:
    """The rates of a device, each second, in 16-bit types; by default one NVIDIA H200."""

    device: str = "NVIDIA H200"
    measured: bool = False  # True where the rates of dense work were measured here and now
    attention: float = 600e12  # operations of dense attention
    linear: float = 700e12  # operations of linears
    memory: float = 4.26e12  # bytes of elementwise work, reads and writes
    link: float = 55e9  # bytes between host and device, each way
    # Share of that rate that each way keeps while the other is used, too: in a sparse step of
    # HunyuanVideo at 720p an H200 waited for transfers that the full rate would have hidden.
    both_ways: float = 0.85
    # Bytes that a device sends to others of its machine while it receives as many, and seconds
    # that an exchange takes besides. Fitted to exchanges of 137 to 581 MB between two and four
    # H200s over NVLink (NCCL, PyTorch 2.11), 0.60 to 1.81 ms, all of which it meets within 7 %.
    peer_link: float = 350e9
    peer_seconds: float = 0.2e-3
    sparse_attention: float = 0.85  # share of the dense rate that sparse attention reaches
    sparse_mlp: float = 0.75  # the same of the sparse MLP, choice of neurons included
    refresh_attention: float = 1.12  # time with column sums over that of dense attention
    # Rate of full attention in FP8 over the 16-bit one, without the rounding; and so many keys of
    # 16-bit attention more for each query. Both hold from 4k to 119k tokens.
    fp8_attention: float = 1.43
    fp8_tokens: float = 550.0
    # Rate of linears whose weights and inputs are in FP8 over the 16-bit one, with the rounding:
    # measured in whole steps of Wan 14B.
    fp8_linear: float = 1.6
    refresh_seconds: float = 0.27e-3  # that a refresh of a layer takes besides
    launch_seconds: float = 1.2e-3  # in which a fast host launches a sparse layer
    host_seconds: float = 1.5e-3  # a usual host: 85 ms for the 57 layers of FLUX.1
    multiprocessors: int = 132  # each computes one query block of one head at a time

    def link_rate(self, to_device: int, to_host: int) -> float:
        """Return bytes per second each way; less where both directions are busy."""
        return self.link * (self.both_ways if to_device and to_host else 1.0)


KNOWN = {  # an H100 computes as fast as an H200; its memory has 3.35 TB/s for 4.8
    rates.device: rates
    for rates in (Rates(), Rates(device="NVIDIA H100 80GB HBM3", memory=2.97e12))
}


def known_rates(device: torch.device, dtype: torch.dtype) -> Rates | None:
    """Return the rates of a device that is here; None for CPUs, unknown GPUs and float32."""
    if device.type != "cuda" or dtype.itemsize != 2:
        return None
    return KNOWN.get(device_name(device))


@dataclass(frozen=True)
class LayerTime:
    """Seconds that one layer computes."""

    attention: float
    mlp: float
    rest: float  # projections and elementwise work

    @property
    def total(self) -> float:
        """Seconds of a whole transformer block."""
        return self.attention + self.mlp + self.rest


@dataclass(frozen=True)
class PartSeconds:
    """Seconds of one part of a layer for one guidance branch."""

    sparse: float
    most: float  # of a sparse step that takes the longest that it may by this estimate
    dense: float

    @property
    def pays(self) -> bool:
        """True where the part saves at least `LEAST_GAIN` of its dense time."""
        return self.most <= (1 - LEAST_GAIN) * self.dense


def kept_columns(plan: SparsityPlan, layer: int) -> int:
    """Return the most columns that a query block of a layer computes at a sparse step."""
    return max(plan.attention_keep_count(layer), plan.layout.text_tokens)


def layer_time(
    layer: int,
    action: Action,
    *,
    plan: SparsityPlan,
    rates: Rates,
    dtype: torch.dtype,  # of the hidden states
    dense_parts: Collection[Part] = (),  # that run dense although the plan has them sparse
    chooses: bool = True,  # False where a refresh keeps another branch's columns: it takes no sums
) -> LayerTime:
    """Return the time of one layer for one guidance branch."""
    if action is Action.SKIP:
        return LayerTime(0.0, 0.0, 0.0)
    layout = plan.layout
    tokens = layout.batch * layout.own.tokens
    attended = layout.batch * layout.tokens * layout.own_attention_channels
    column = 4.0 * attended / rates.attention
    attention = column * len(layout.query_rows)
    sixteen_bit = attention
    sparse = {part for part in PARTS if part not in dense_parts and plan.is_sparse(layer, part)}
    if plan.config.attention.in_fp8:
        rounding = FP8_PASSES * attended * dtype.itemsize / rates.memory
        attention *= 1 / rates.fp8_attention + rates.fp8_tokens / layout.tokens
        attention += rounding
    if "attention" in sparse:
        means = plan.config.attention.delta_rule == "block_means"
        share = kept_columns(plan, layer) / layout.tokens + MEANS_SHARE * means
        kept = share / rates.sparse_attention * sixteen_bit
        if action is Action.SPARSE:
            attention = kept
        elif action is Action.REFRESH:
            attention *= rates.refresh_attention if chooses else 1.0
            attention += rates.refresh_seconds
    attention += column * layout.full_attention_rows  # these rows see everything
    kind = layout.kind(layer)
    number = 2.0 * layout.width / rates.linear
    rows = kind.mlp_linears * kind.intermediate_size
    mlp_tokens = layout.batch * layout.mlp_tokens(layer)
    mlp = number * mlp_tokens * rows
    if "mlp" in sparse and action is Action.SPARSE:
        mlp *= plan.mlp_keep_count(layer) / kind.intermediate_size / rates.sparse_mlp
    mlp += number * (tokens - mlp_tokens) * rows  # of the text
    projections = number * tokens * kind.projections * layout.channels
    elementwise = ELEMENTWISE_PASSES * tokens * layout.width * dtype.itemsize / rates.memory
    return LayerTime(attention, mlp, projections + elementwise)


def part_seconds(
    plan: SparsityPlan,
    layer: int,
    part: Part,
    *,
    rates: Rates,
    dtype: torch.dtype,
    captured: bool,
    fp8: Fp8Form | None = None,
) -> PartSeconds:
    """Return how long a part of a layer takes that the plan has sparse; see `part_times`."""
    layout = plan.layout
    kind = plan.layout.kind(layer)
    size = dtype.itemsize
    sparse, dense = (
        getattr(layer_time(layer, action, plan=plan, rates=rates, dtype=dtype), part)
        for action in (Action.SPARSE, Action.DENSE)
    )
    idle = 1.0
    if part == "attention":
        blocks = layout.batch * block_count(len(layout.query_rows), plan.config.block_size)
        row = layout.own_attention_channels * size
        gathered = 2 * blocks * kept_columns(plan, layer) * row
        read, read_dense = (n * layout.batch * layout.tokens * row for n in (3, 4))
        # The last query blocks leave processors idle.
        blocks *= layout.own.heads
        idle = block_count(blocks, rates.multiprocessors) * rates.multiprocessors / blocks
    else:
        tokens = layout.mlp_tokens(layer)
        kept = plan.mlp_keep_count(layer)
        blocks = layout.batch * block_count(tokens, plan.config.block_size)
        gathered = blocks * kept * kind.mlp_linears * layout.width * size
        tokens *= layout.batch
        read = tokens * (NEURON_PASSES * kept + (1 + OUTPUT_PASSES) * layout.width) * size
        read_dense = tokens * 2 * (kind.intermediate_size + layout.width) * size
    sparse = max(sparse, gathered / GATHER_RATE, read / rates.memory) + SPARSE_SECONDS[part]
    dense = max(dense, read_dense / rates.memory)
    if part == "mlp" and fp8 is not None:
        # Weights are read in FP8 and written in another type.
        weights = kind.mlp_linears * kind.intermediate_size * layout.width * (1 + size)
        sparse += weights / rates.memory + READING_SECONDS
        if fp8 == "weights":
            dense += weights / rates.memory
        else:
            # Rows that linears read are read for their largest number, read again and rounded.
            numbers = (kind.mlp_linears - 1) * layout.width + kind.intermediate_size
            rounded = layout.batch * layout.mlp_tokens(layer) * numbers * (2 * size + 1)
            dense = dense / rates.fp8_linear + rounded / rates.memory
    most = (MOST[part] * sparse + MOST_SECONDS) * idle
    return PartSeconds(sparse, most if captured else max(most, HOST_SECONDS[part]), dense)


def part_times(
    plan: SparsityPlan,
    *,
    rates: Rates,
    dtype: torch.dtype,
    captured: bool,  # sparse steps are replays of a CUDA graph, which no host launches
    dense: Collection[tuple[int, Part]] = (),  # parts that cannot run sparse in any case
    fp8_mlps: Mapping[int, Fp8Form] | None = None,  # layers with MLP weights in FP8
) -> dict[tuple[int, Part], PartSeconds]:
    """Return the times of all parts that the plan has sparse; none where a backend is forced."""
    if plan.config.backend != "auto" or plan.is_dense():
        return {}
    in_fp8 = fp8_mlps or {}
    return {
        (layer, part): part_seconds(
            plan,
            layer,
            part,
            rates=rates,
            dtype=dtype,
            captured=captured,
            fp8=in_fp8.get(layer),
        )
        for part in PARTS
        for layer in range(plan.layout.layers)
        if plan.is_sparse(layer, part) and (layer, part) not in dense
    }


def slower_parts(
    times: Mapping[tuple[int, Part], PartSeconds],
    rates: Rates,
) -> dict[tuple[int, Part], str]:
    """Return the parts that run dense since a sparse step may be no faster, with the reason."""
    return {
        place: f"by the rates of one {rates.device} a sparse step of it may take up to "
        f"{milliseconds_text(seconds.most)}, and a dense one takes "
        f"{milliseconds_text(seconds.dense)}"
        for place, seconds in times.items()
        if not seconds.pays
    }


def milliseconds_text(seconds: float) -> str:
    """Return a time with two significant digits: 0.0061 ms, 0.35 ms, 12 ms."""
    return f"{float(f'{1e3 * seconds:.2g}'):g} ms"


def captures(plan: SparsityPlan, dtype: torch.dtype, rates: Rates | None = None) -> bool:
    """Return True where sparse calls are captured as CUDA graphs, as they would wait for the host.

    A replay takes the host next to nothing, and a capture `CAPTURE_CALLS` calls. Without ``rates``
    those of an H200 count.
    """
    if plan.config.cuda_graphs == "never" or plan.is_dense():
        return False
    if plan.config.cuda_graphs == "always":
        return True
    rates = rates or Rates()
    layers = range(plan.layout.layers)
    host = len(layers) * rates.host_seconds
    times = (layer_time(n, Action.SPARSE, plan=plan, rates=rates, dtype=dtype) for n in layers)
    waits = host - sum(time.total for time in times)
    return waits * (plan.sparse_steps - CALLS_BEFORE) > CAPTURE_CALLS * host


def as_of_many(config: SparsityConfig, plan: SparsityPlan, dtype: torch.dtype) -> SparsityConfig:
    """Return the config with which a few sparse steps run as those of the planned generation do."""
    return config.override({"cuda_graphs": "always" if captures(plan, dtype) else "never"})
