"""Models whose pipelines guide with two samples in one call, of prompts that differ in length.

Layers have one sequence length in a call, and no mask where they run sparse. So, where anything may
run sparse, samples with prompts of other lengths are called separately, and each length is a
guidance branch of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch

from chipsparse.layout import ModelLayout
from chipsparse.pipelines.call_reader import Arguments, CallReader
from chipsparse.skip.why import may_be_sparse
from chipsparse.sparse.plan import SparsityPlan


class SeparateLengths(CallReader):
    """Reads calls whose prompts may differ in length, and divides them."""

    lengths: list[int] | None = None  # of the open call's prompts, one per sample; None: not known
    is_open = False  # a whole call is read or divided: calls within are parts of it
    _branches = 1
    _samples: tuple[int, ...] | None = None

    def prompt_lengths(self, arguments: Arguments) -> list[int] | None:
        """Return the lengths of a call's prompts in the sequence; None where they are not known."""
        raise NotImplementedError

    @property
    def branches(self) -> int:
        """Guidance branches that the open call is divided into."""
        return self._branches

    def layout(self, arguments: Arguments) -> ModelLayout:
        """Return the sizes of a call, with the samples that it has of a divided one."""
        return replace(super().layout(arguments), samples=self._samples)

    def run(
        self,
        call: Callable[[tuple[Any, ...], Mapping[str, Any]], Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        position: Mapping[str, Any],
        is_known: Callable[[Arguments], bool],
        is_guided: Callable[[], bool],
    ) -> Any:
        """Run the transformer once for each length of prompt where anything may be sparse.

        Args:
            call: runs it with some arguments.
            args: the positional arguments of the whole call.
            kwargs: its named arguments.
            position: what names the whole call for ``cache_context``.
            is_known: tells whether the step of a call is known; others run as one.
            is_guided: tells whether the halves of the batch are guidance branches.
        """
        with self._opened():
            arguments = self.named(args, kwargs)
            lengths = self.prompt_lengths(arguments)
            self.lengths = lengths
            self._branches = 1
            self._samples = None
            distinct = list(dict.fromkeys(lengths or ()))
            together = len(distinct) < 2 or torch.is_grad_enabled()
            if not together and self.split is None:  # the model masks them where nothing is sparse
                together = not (is_known(arguments) and self._may_be_sparse(arguments))
            if together:
                return call(args, kwargs)
            self._branches = len(distinct)
            position = {"name": "call", **position}
            samples = lengths or []
            # Each half of a guided batch has the same videos or images.
            guided = len(samples) % 2 == 0 and is_guided()
            videos = len(samples) // 2 if guided else len(samples)
            results = []
            order = []
            for length in distinct:
                rows = [row for row, tokens in enumerate(samples) if tokens == length]
                name = f"{position['name']} {','.join(map(str, rows))}"
                self.lengths = [length] * len(rows)
                self._samples = tuple(row % videos for row in rows)
                own_position = {**position, "name": name}
                with self.model.cache_context(**own_position):
                    results.append(call((), rows_of(arguments, rows, len(samples))))
                order += rows
            return joined(results, torch.tensor(order).argsort())

    @contextlib.contextmanager
    def _opened(self) -> Iterator[None]:
        self.is_open = True
        try:
            yield
        finally:
            self.is_open = False

    def _may_be_sparse(self, arguments: Arguments) -> bool:
        layout = self.layout(arguments)
        config = self.session.config
        if not SparsityPlan(config, layout).has_sparse_layers:
            return False
        return may_be_sparse(config.schedule.form, self.session.sparse_cost(layout))


def rows_of(arguments: Arguments, rows: list[int], batch: int) -> Arguments:
    """The arguments of a call for some samples of a batch."""
    taken = dict(arguments)
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor) and value.ndim > 0 and len(value) == batch:
            taken[name] = value[rows]
        elif isinstance(value, list) and len(value) == batch:
            taken[name] = [value[row] for row in rows]
    return taken


def joined(results: list[Any], order: torch.Tensor) -> Any:
    """Join results with samples of a batch each, as tensors or as lists, in an order ``[B]``."""
    first = results[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(results)[order.to(first.device)]
    if isinstance(first, list):
        samples = [sample for result in results for sample in result]
        return [samples[row] for row in order.tolist()]
    if isinstance(first, tuple):
        return tuple(joined(list(parts), order) for parts in zip(*results, strict=True))
    if is_dataclass(first) and not isinstance(first, type):
        names = [field.name for field in fields(first)]
        return type(first)(
            **{name: joined([getattr(each, name) for each in results], order) for name in names},
        )
    return first
