"""How long the layers of a transformer take: an estimate from sizes and a device's rates.

A layer's time is the sum of

- attention: ``4 N^2 C`` operations, or the kept share of them, slowed by what the sparse kernel
  does not reach;
- the projections around it, ``2 N C^2`` each, and the feed-forward layer, ``4 N C F`` or the kept
  share of it, slowed likewise (C is the width of the hidden states, or that of all heads);
- the elementwise work between them: `ELEMENTWISE_PASSES` times the bytes of the hidden states.

Left out: attention to a prompt beside the sequence, and the embeddings. For all layers of
FLUX.1-dev at 1280x768 on an H200 it gives 126, 144 and 78 ms dense, at a refresh and sparse;
measured were 124, 144 and 76 (benchmarks/results/transformer_step_h200.json).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch

from chipsparse.cache.kinds import PARTS, Part
from chipsparse.cache.placement import SLOTS
from chipsparse.layout import ModelLayout
from chipsparse.plan import Action, SparsityPlan

# Reads and writes of tensors as large as the hidden states, in a block compiled by PyTorch:
# what a dense step of FLUX.1-dev takes beyond its attention and linears.
ELEMENTWISE_PASSES = 66
# To make queries, keys and values 8 bits wide: the latter two are read twice, all are written at
# half. That is 6.5, at three quarters of the memory's rate.
FP8_PASSES = 8.5


@dataclass(frozen=True)
class Rates:
    """What a device does in a second, in 16-bit types; by default one NVIDIA H200.

    Attributes:
        device: its name.
        measured: whether the rates of dense work were measured on it, here and now.
        attention: operations of dense attention.
        linear: operations of linears.
        memory: bytes of elementwise work, reads and writes.
        link: bytes between host and device, each way.
        both_ways: share of that rate that each way keeps while the other is used, too: in a sparse
            step of HunyuanVideo at 720p an H200 waited for transfers that the full rate would have
            hidden.
        peer_link: bytes between devices of one machine, that one of them sends to the others while
            it receives as many. Fitted, with ``peer_seconds``, to exchanges of 137 to 581 MB
            between two and four H200s over NVLink (NCCL, PyTorch 2.11), 0.60 to 1.81 ms, all of
            which it meets within 7 %.
        peer_seconds: what an exchange between devices takes besides, whatever is sent.
        sparse_attention: share of the dense rate that sparse attention reaches.
        sparse_mlp: likewise the sparse feed-forward layer, choice of neurons included.
        refresh_attention: time of a refresh's attention, column sums included, over that of a
            dense one.
        fp8_attention: rate of full attention in FP8 over the 16-bit one at any number of tokens,
            without the rounding.
        fp8_tokens: keys of 16-bit attention, so many more for each query, that FP8 takes the time
            of besides: with few tokens it is the slower one. Both from 4k to 119k tokens.
        fp8_linear: rate of linears whose weights and inputs are in FP8 over the 16-bit one, with
            the rounding: measured in whole steps of Wan 14B.
        refresh_seconds: what a refresh of a layer takes besides, whatever the sizes.
        launch_seconds: what the host takes to launch a sparse layer; none is faster that is not
            recorded.
    """

    device: str = "NVIDIA H200"
    measured: bool = False
    attention: float = 600e12
    linear: float = 700e12
    memory: float = 4.26e12
    link: float = 55e9
    both_ways: float = 0.85
    peer_link: float = 350e9
    peer_seconds: float = 0.2e-3
    sparse_attention: float = 0.85
    sparse_mlp: float = 0.75
    refresh_attention: float = 1.12
    fp8_attention: float = 1.43
    fp8_tokens: float = 550.0
    fp8_linear: float = 1.6
    refresh_seconds: float = 0.27e-3
    launch_seconds: float = 1.2e-3

    def link_rate(self, to_device: int, to_host: int) -> float:
        """Bytes a second each way, where so many are to come and to go."""
        return self.link * (self.both_ways if to_device and to_host else 1.0)


@dataclass(frozen=True)
class LayerTime:
    """Seconds that one layer computes.

    Attributes:
        attention: its self-attention.
        mlp: its feed-forward layer.
        rest: projections and elementwise work.
    """

    attention: float
    mlp: float
    rest: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.attention + self.mlp + self.rest


@dataclass(frozen=True)
class Load:
    """What a piece of a layer computes and moves.

    Attributes:
        seconds: its computation.
        part: whose slots it uses.
        to_device: bytes that must have arrived before.
        to_host: bytes that leave behind it.
    """

    seconds: float
    part: Part = "attention"
    to_device: int = 0
    to_host: int = 0


def kept_columns(plan: SparsityPlan, layer: int) -> int:
    """The most columns that a query block of a layer computes at a sparse step."""
    layout = plan.layout
    most = max(plan.attention_keep_count(layer), layout.text_tokens) + plan.attention_random_count()
    return min(layout.tokens, most)


def layer_time(
    layer: int,
    action: Action,
    *,
    plan: SparsityPlan,
    rates: Rates,
    dtype: torch.dtype,
    dense_parts: Collection[Part] = (),
    chooses: bool = True,
) -> LayerTime:
    """The time of one layer for one guidance branch.

    Args:
        layer: number of the transformer block.
        action: what the step does; nothing takes time in a skipped one.
        plan: has sizes and shares.
        rates: of the device.
        dtype: of the hidden states.
        dense_parts: parts of this layer that run dense although the plan has them sparse.
        chooses: whether the branch chooses columns at a refresh, or keeps those of another one,
            which takes no column sums.
    """
    if action is Action.SKIP:
        return LayerTime(0.0, 0.0, 0.0)
    layout = plan.layout
    tokens = layout.batch * layout.own_tokens
    attended = layout.batch * layout.tokens * layout.own_attention_channels
    column = 4.0 * attended / rates.attention
    attention = column * layout.own_query_rows
    sixteen_bit = attention
    sparse = {part for part in PARTS if part not in dense_parts and plan.is_sparse(layer, part)}
    refreshes = "attention" in sparse and action is Action.REFRESH
    in_full = Action.REFRESH if refreshes else Action.DENSE
    if plan.config.attention.precision_of(in_full) == "fp8":
        rounding = FP8_PASSES * attended * dtype.itemsize / rates.memory
        attention *= 1 / rates.fp8_attention + rates.fp8_tokens / layout.tokens
        attention += rounding
    if "attention" in sparse:
        kept = kept_columns(plan, layer) / layout.tokens / rates.sparse_attention * sixteen_bit
        if action is Action.SPARSE:
            attention = kept
        elif action is Action.REFRESH:
            attention *= rates.refresh_attention if chooses else 1.0
            attention += rates.refresh_seconds
    attention += column * layout.exact_rows  # these rows see everything
    kind = layout.kind(layer)
    rows = kind.mlp_linears * kind.intermediate_size
    mlp_tokens = layout.batch * layout.mlp_tokens(layer)
    mlp = _linear_seconds(mlp_tokens, layout, rows, rates)
    if "mlp" in sparse and action is Action.SPARSE:
        mlp *= plan.mlp_keep_count(layer) / kind.intermediate_size / rates.sparse_mlp
    mlp += _linear_seconds(tokens - mlp_tokens, layout, rows, rates)  # of the text
    projected = kind.projections * layout.channels
    elementwise = ELEMENTWISE_PASSES * tokens * layout.width * dtype.itemsize / rates.memory
    return LayerTime(
        attention, mlp, _linear_seconds(tokens, layout, projected, rates) + elementwise
    )


def _linear_seconds(tokens: int, layout: ModelLayout, width: int, rates: Rates) -> float:
    return 2.0 * tokens * layout.width * width / rates.linear


def step_seconds(loads: Iterable[Load], rates: Rates) -> float:
    """The time of pieces that run one behind the other while the link fetches ahead.

    A piece's tensors are fetched from when the one before that uses the same slots begins, into the
    slot that was emptied longest ago; what changed goes back in the other direction of the link.
    """
    loads = list(loads)
    up, down = sum(load.to_device for load in loads), sum(load.to_host for load in loads)
    link = rates.link_rate(up, down)
    end = fetched = written = 0.0
    asked: dict[Part, float] = {}
    emptied: dict[Part, list[float]] = {}  # when each of the two slots was free again
    for load in loads:
        start = end
        free = emptied.setdefault(load.part, [0.0] * SLOTS)
        moves = load.to_device > 0 or load.to_host > 0
        if moves:
            fetched = max(fetched, asked.get(load.part, 0.0), free[0])
            fetched += load.to_device / link
            start = asked[load.part] = max(end, fetched)
        end = start + load.seconds
        if load.to_host:
            written = max(written, end) + load.to_host / link
        if moves:
            emptied[load.part] = [*free[1:], written if load.to_host else end]
    return end
