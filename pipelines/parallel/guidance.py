"""Guidance branches on different processes: each computes a call of a step, and they swap outputs.

A pipeline calls the transformer once for each branch and looks at the outputs after the last one. A
call that another process computes returns a tensor that gets its values at the last call of the
step. Reading it before fails.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from diffusers.models.modeling_outputs import Transformer2DModelOutput

from chipsparse.parallel.peers import Peers
from chipsparse.skip.position import Place


class Unfilled(torch.Tensor):
    """An output that another process has yet to send; then it stands for that, in every operation.

    A piece of it that is cut out before (FLUX.2 leaves reference images out) waits as well.
    """

    output: torch.Tensor | None  # None until it is sent
    cut: tuple[Unfilled, Any] | None  # of a piece: what it is cut out of, and the index

    @classmethod
    def wait(cls, cut: tuple[Unfilled, Any] | None = None) -> Unfilled:
        """Return an output without values; with `cut`, the piece of another one at an index."""
        waiting = torch.empty(0).as_subclass(cls)
        waiting.output = None
        waiting.cut = cut
        return waiting

    @classmethod
    def __torch_function__(cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs what uses it on what was sent; raises `RuntimeError` where that is not there yet."""
        whole = args[0] if func is torch.Tensor.__getitem__ else None
        if isinstance(whole, Unfilled) and whole.output is None:
            return cls.wait((whole, args[1]))
        named = {name: _sent(value, func) for name, value in (kwargs or {}).items()}
        return func(*(_sent(value, func) for value in args), **named)


def _sent(value: Any, func: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_sent(item, func) for item in value)
    if not isinstance(value, Unfilled):
        return value
    if value.output is None and value.cut is not None:
        whole, index = value.cut
        value.output = _sent(whole, func)[index]
    if value.output is None:
        raise RuntimeError(
            f"the pipeline uses the output of a guidance branch ({getattr(func, '__name__', func)})"
            " before it calls the transformer for the last one, so these branches cannot be on "
            "different processes; use Parallel(guidance=1)",
        )
    return value.output


def output_of(result: Any) -> torch.Tensor:
    """Return the one output of a model that shares guidance; see `wrapped`."""
    return result[0]


def wrapped(output: torch.Tensor, arguments: Mapping[str, Any]) -> Any:
    """Return an output as the models that share guidance do.

    A process never sees a result of the calls that others compute, so their form is fixed here.
    """
    if arguments.get("return_dict", True):
        return Transformer2DModelOutput(sample=output)
    return (output,)


class GuidanceSplit:
    """This process's part in the guidance branches of a pipeline.

    The processes of the group, which are the peers, compute one branch each, of the tokens that
    this one has: the first one computes the first call of a step, and so on.
    """

    def __init__(self, group: Any, peers: Peers) -> None:
        self.peers = peers
        self._group = group
        self._begin(None)

    def _begin(self, step: tuple[int, int] | None) -> None:
        self._step = step
        self._place = -1  # of the call among those of the step
        self._own: torch.Tensor | None = None
        self._waiting: list[Unfilled] = []

    def computes(self, place: Place) -> bool:
        """Count a call of a step, and return whether this process computes it."""
        step = place.generation, place.step
        if step != self._step:
            self._begin(step)
        self._place += 1
        if self._place >= len(self.peers):
            raise ValueError(
                f"step {place.step} has more than {len(self.peers)} guidance branches, so they "
                "cannot be on as many processes; use Parallel(guidance=1)",
            )
        return self._place == self.peers.rank

    def output(self, own: torch.Tensor | None) -> torch.Tensor:
        """The output of the call that was counted last; the last call of a step fills the others.

        `own` is what this process computed; None where it computes another call.
        """
        if own is not None:
            self._own = own
        if self._place < len(self.peers) - 1:
            if own is not None:
                return own
            self._waiting.append(Unfilled.wait())
            return self._waiting[-1]
        assert self._own is not None
        outputs = self._swapped(self._own.contiguous())
        others = [output for rank, output in enumerate(outputs) if rank != self.peers.rank]
        for waiting, output in zip(self._waiting, others, strict=False):
            waiting.output = output
        self._own = None
        self._waiting = []
        return outputs[self._place]

    def _swapped(self, own: torch.Tensor) -> list[torch.Tensor]:
        ranks = range(len(self.peers))
        outputs = [own if rank == self.peers.rank else torch.empty_like(own) for rank in ranks]
        with self.peers.exchange():
            dist.all_gather(outputs, own, group=self._group)
        return outputs
