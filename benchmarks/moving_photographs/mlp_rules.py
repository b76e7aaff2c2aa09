"""Rules for sparse feed-forward layers, simulated: all is computed, and held values are put back.

A rule says what a sparse step takes for the output of a feed-forward layer, from what the last
refresh computed and what it would itself compute. Its *time* is what a kernel for it could take
over the dense layer. So a rule is judged on whole generations before any kernel is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from chipsparse.config import Action

# A sparse product takes this share of a dense one's rate, choice included: 0.30 of the neurons took
# 0.40 of the time (benchmarks/notes/sparse_mlp.md).
GATHERED_NEURONS = 0.75
# Rows that are gathered for a dense product, and means of tokens: one more pass over the input.
GATHERED_ROWS = 0.95
POOLING = 0.03
TILE = (4, 4, 8)  # tokens of a block of 128 lie so in the video


@dataclass(frozen=True)
class FeedForward:
    """The weights of a feed-forward layer, ``[F, C]``, ``[F]``, ``[C, F]`` and ``[C]``."""

    up: Tensor
    up_bias: Tensor
    down: Tensor
    down_bias: Tensor

    @classmethod
    def of(cls, module: Any) -> FeedForward:
        """The weights of diffusers' ``FeedForward`` with a GELU."""
        up = module.net[0].proj
        down = module.net[2]
        return cls(up.weight, up.bias, down.weight, down.bias)

    def preactivation(self, hidden: Tensor) -> Tensor:
        """``[N, C]`` to ``[N, F]``."""
        return F.linear(hidden, self.up, self.up_bias)

    def second(self, activation: Tensor) -> Tensor:
        """``[N, F]`` to ``[N, C]``."""
        return F.linear(activation, self.down, self.down_bias)

    def __call__(self, hidden: Tensor) -> Tensor:
        """The layer of ``[N, C]``."""
        return self.second(gelu(self.preactivation(hidden)))


gelu = partial(F.gelu, approximate="tanh")


class Kept(Protocol):
    """What a rule keeps of one layer and branch since a refresh."""

    def step(self, hidden: Tensor) -> Tensor:
        """The output of a sparse step for ``[N, C]``."""


@dataclass(frozen=True)
class Rule:
    """A rule by name.

    Attributes:
        name: as tables have it.
        time: of a sparse step of the layer, over a dense one.
        refresh: makes what is kept, of the layer and its input ``[N, C]`` at a refresh.
    """

    name: str
    time: float
    refresh: Callable[[FeedForward, Tensor], Kept]


def block_means(values: Tensor, size: int) -> Tensor:
    """``[N, C]`` to ``[N / size, C]``; ``size`` divides N."""
    return values.unflatten(0, (-1, size)).mean(1)


@dataclass
class Held:
    """Keeps the output of the refresh."""

    layer: FeedForward
    hidden: Tensor
    output: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.output = self.layer(self.hidden)

    def step(self, hidden: Tensor) -> Tensor:
        """The output of the refresh."""
        return self.output


@dataclass
class Neurons:
    """Recomputes the neurons of each block of tokens whose mean changed most.

    Attributes:
        share: of the neurons.
        size: tokens of a block.
        means: others change by what the block's mean changes, ``act(m') - act(m)``.
        weighed: changes count times the norm of the neuron's column of the second matrix.
    """

    layer: FeedForward
    hidden: Tensor
    share: float
    size: int = 128
    means: bool = False
    weighed: bool = False

    def __post_init__(self) -> None:
        before = self.layer.preactivation(self.hidden)
        self._activation, self._means = gelu(before), block_means(before, self.size)
        self._norms = self.layer.down.norm(dim=0)

    def step(self, hidden: Tensor) -> Tensor:
        """The layer of the neurons that are chosen, which replace the kept ones."""
        before = self.layer.preactivation(hidden)
        means = block_means(before, self.size)
        scores = (means - self._means).abs()
        if self.weighed:
            scores = (gelu(means) - gelu(self._means)).abs() * self._norms
        count = round(self.share * scores.shape[1])
        chosen = torch.zeros_like(scores, dtype=torch.bool)
        chosen.scatter_(1, scores.topk(count, dim=1).indices, True)
        of_tokens = chosen.repeat_interleave(self.size, 0)
        self._activation = torch.where(of_tokens, gelu(before), self._activation)
        others = (gelu(means) - gelu(self._means)).masked_fill(chosen, 0)
        self._means = torch.where(chosen, means, self._means)
        output = self.layer.second(self._activation)
        if self.means:
            output = output + F.linear(others, self.layer.down).repeat_interleave(self.size, 0)
        return output


@dataclass
class Rows:
    """Recomputes the tokens whose input changed most; others keep their output.

    Attributes:
        share: of the tokens.
    """

    layer: FeedForward
    hidden: Tensor
    share: float

    def __post_init__(self) -> None:
        self._hidden, self._output = self.hidden.clone(), self.layer(self.hidden)

    def step(self, hidden: Tensor) -> Tensor:
        """The output, of which some rows are new."""
        changes = (hidden.float() - self._hidden.float()).norm(dim=1)
        rows = changes.topk(round(self.share * len(changes))).indices
        self._hidden[rows] = hidden[rows]
        self._output[rows] = self.layer(hidden[rows])
        return self._output.clone()


@dataclass
class Pooled:
    """Adds to each token the change of the layer's output for the mean of its group of tokens.

    Attributes:
        group: frames, rows and columns of tokens that have one mean.
        share: of the tokens, those that differ most from their group's change are recomputed.
    """

    layer: FeedForward
    hidden: Tensor
    group: tuple[int, int, int]
    share: float = 0.0

    def __post_init__(self) -> None:
        self._output, self._means = self.layer(self.hidden), self._pooled(self.hidden)
        self._of_means = self.layer(self._means)

    def _grouped(self, values: Tensor) -> Tensor:
        """``[N, C]`` in tiles to ``[groups, tokens of a group, C]``."""
        parts = [(side // part, part) for side, part in zip(TILE, self.group, strict=True)]
        tiles = values.view(-1, *(size for pair in parts for size in pair), values.shape[1])
        return tiles.permute(0, 1, 3, 5, 2, 4, 6, 7).flatten(0, 3).flatten(1, 3)

    def _spread(self, groups: Tensor) -> Tensor:
        """``[groups, C]`` to each token of theirs, ``[N, C]`` in tiles."""
        counts = [side // part for side, part in zip(TILE, self.group, strict=True)]
        tiles = groups.view(-1, *counts, groups.shape[1])
        for axis, part in enumerate(self.group, 1):
            tiles = tiles.repeat_interleave(part, axis)
        return tiles.flatten(0, 3)

    def _pooled(self, hidden: Tensor) -> Tensor:
        return self._grouped(hidden).mean(1)

    def step(self, hidden: Tensor) -> Tensor:
        """The output of the refresh, plus the change of the means' output."""
        means = self._pooled(hidden)
        output = self._output + self._spread(self.layer(means) - self._of_means)
        if self.share:
            own = (hidden - self.hidden) - self._spread(means - self._means)
            rows = own.float().norm(dim=1).topk(round(self.share * len(own))).indices
            output[rows] = self.layer(hidden[rows])
        return output


def _neurons(share: float, **fields: Any) -> Callable[[FeedForward, Tensor], Kept]:
    return partial(Neurons, share=share, **fields)


def _neurons_time(share: float, size: int = 128) -> float:
    """Smaller blocks gather the weights more often, which costs them a part of the rate."""
    return share / (GATHERED_NEURONS * {128: 1.0, 64: 0.8, 32: 0.55}[size])


BY_MEANS = 1 / 128  # of the layer: a block's means through the second matrix
RULES = [
    Rule("held", 0.0, Held),
    Rule("30 % of the neurons", _neurons_time(0.3), _neurons(0.3)),
    Rule("50 % of the neurons", _neurons_time(0.5), _neurons(0.5)),
    Rule("30 %, means", _neurons_time(0.3) + BY_MEANS, _neurons(0.3, means=True)),
    Rule(
        "30 %, means, weighed",
        _neurons_time(0.3) + BY_MEANS,
        _neurons(0.3, means=True, weighed=True),
    ),
    Rule(
        "20 %, means, weighed, blocks of 64",
        _neurons_time(0.2, 64) + 2 * BY_MEANS,
        _neurons(0.2, size=64, means=True, weighed=True),
    ),
    Rule(
        "20 %, means, weighed, blocks of 32",
        _neurons_time(0.2, 32) + 4 * BY_MEANS,
        _neurons(0.2, size=32, means=True, weighed=True),
    ),
    Rule("30 % of the rows", 0.3 / GATHERED_ROWS + POOLING, partial(Rows, share=0.3)),
    Rule("50 % of the rows", 0.5 / GATHERED_ROWS + POOLING, partial(Rows, share=0.5)),
    Rule("means of 4 tokens", 1 / 4 + POOLING, partial(Pooled, group=(1, 2, 2))),
    Rule("means of 8 tokens", 1 / 8 + POOLING, partial(Pooled, group=(2, 2, 2))),
    Rule("means of 16 tokens", 1 / 16 + POOLING, partial(Pooled, group=(2, 2, 4))),
    Rule(
        "means of 8 tokens, 15 % of the rows",
        1 / 8 + 0.15 / GATHERED_ROWS + 2 * POOLING,
        partial(Pooled, group=(2, 2, 2), share=0.15),
    ),
]


@contextmanager
def simulated(rule: Rule, pipe: Any, *, first: int) -> Iterator[None]:
    """Runs the feed-forward layers of a patched Wan pipeline by a rule for the time being.

    Args:
        rule: of sparse steps.
        pipe: patched with a config of dense feed-forward layers.
        first: layers before this one stay dense.
    """
    transformer = pipe.transformer
    session = transformer.chipsparse_runner.sparse.session
    kept: dict[tuple[str, int], list[Kept]] = {}

    def by_rule(layer: int, module: Any) -> Callable[[Tensor], Tensor]:
        dense = module.forward

        def forward(hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            state = session.state
            action = None if state is None else state.action
            if action is Action.REFRESH:
                weights = FeedForward.of(module)
                kept[state.branch, layer] = [rule.refresh(weights, sample) for sample in hidden]
            if action is not Action.SPARSE:
                output: Tensor = dense(hidden, *args, **kwargs)
                return output
            samples = zip(kept[state.branch, layer], hidden, strict=True)
            return torch.stack([one.step(sample) for one, sample in samples])

        return forward

    with ExitStack() as stack:
        for layer, block in enumerate(transformer.blocks):
            if layer >= first:
                stack.callback(vars(block.ffn).pop, "forward", None)
                block.ffn.forward = by_rule(layer, block.ffn)
        yield
