"""Models whose pipelines guide with two samples in one call, of prompts that differ in length."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from chipsparse.layout import ModelLayout
from chipsparse.pipelines.adapter import ModelAdapter
from chipsparse.skip.why import may_be_sparse
from chipsparse.sparse.plan import SparsityPlan


class SeparateLengths(ModelAdapter):
    """An adapter that calls samples with prompts of other lengths separately.

    Layers have one sequence length in a call, and no mask where they run sparse. So, where anything
    may run sparse, each length is a guidance branch of its own.
    """

    lengths: list[int] | None = None  # of the open call's prompts, one per sample; None: not known
    _branches = 1
    _samples: tuple[int, ...] | None = None

    def prompt_lengths(self, arguments: dict[str, Any]) -> list[int] | None:
        """The lengths of a call's prompts in the sequence; None where they are not known."""
        raise NotImplementedError

    def branches(self) -> int:
        return self._branches

    def layout(self, arguments: dict[str, Any]) -> ModelLayout:
        return replace(super().layout(arguments), samples=self._samples)

    @torch.compiler.disable(recursive=False)
    def call(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """Runs the transformer once for each length of prompt where anything may be sparse."""
        arguments = self.named(args, kwargs)
        lengths = self.prompt_lengths(arguments)
        self.lengths = lengths
        self._branches = 1
        self._samples = None
        distinct = list(dict.fromkeys(lengths or ()))
        together = len(distinct) < 2 or torch.is_grad_enabled()
        if not together and self.split is None:  # the model masks them where nothing is sparse
            layout = self.layout(arguments)
            config = self.session.config
            sparse_layers = SparsityPlan(config, layout).has_sparse_layers
            cost = self.session.sparse_cost(layout)
            together = not (sparse_layers and may_be_sparse(config.schedule.form, cost))
        if together:
            return super().call(forward, args, kwargs)
        self._branches = len(distinct)
        position = {"name": "call", **self.named_position}
        samples = lengths or []
        outputs = []
        order = []
        # Of a guided batch, each half has the same videos or images.
        guided = self._loop.branches() is None and self._is_guided() and len(samples) % 2 == 0
        videos = len(samples) // 2 if guided else len(samples)
        for length in distinct:
            rows = [row for row, tokens in enumerate(samples) if tokens == length]
            name = f"{position['name']} {','.join(map(str, rows))}"
            self.lengths = [length] * len(rows)
            self._samples = tuple(row % videos for row in rows)
            with self._model.cache_context(**{**position, "name": name}):
                result = super().call(forward, (), rows_of(arguments, rows, len(samples)))
            outputs.append(self.held_output(result))
            order += rows
        output = torch.cat(outputs)
        return self.wrap_output(output[torch.tensor(order).argsort().to(output.device)], arguments)


def rows_of(arguments: dict[str, Any], rows: list[int], batch: int) -> dict[str, Any]:
    """The arguments of a call for some samples of a batch."""
    taken = dict(arguments)
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor) and value.ndim > 0 and len(value) == batch:
            taken[name] = value[rows]
        elif isinstance(value, list) and len(value) == batch:
            taken[name] = [value[row] for row in rows]
    return taken
