"""The outputs of computed calls, of any form, and the outputs of skipped calls made from them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple, cast

import torch
from torch.utils import _pytree as pytree

HeldTensors = tuple[torch.Tensor, ...]
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


@dataclass(frozen=True)
class OutputForm:
    """The form of a result without its tensors: classes, nesting and plain values."""

    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]  # by leaf: `TENSOR`, a plain value, or a `_Dataclass`


@dataclass(frozen=True)
class _Dataclass:
    """A leaf that is a dataclass which PyTorch's trees do not know."""

    made: type
    fields: OutputForm  # of a dict of them


class _TensorLeaf:
    """A leaf that is a tensor."""


TENSOR = _TensorLeaf()


def flatten(result: object) -> tuple[HeldTensors, OutputForm]:
    """Return the tensors of a result in a fixed order, and its form.

    Args:
        result: a tensor, or tuples, lists, dicts, dataclasses and outputs of diffusers in any
            nesting, with tensors and plain values in them.

    Raises:
        ValueError: if the result holds an object of another class.
    """
    found, spec = pytree.tree_flatten(result)
    tensors: list[torch.Tensor] = []
    leaves: list[Any] = []
    for leaf in found:
        if isinstance(leaf, torch.Tensor):
            tensors.append(leaf)
            leaves.append(TENSOR)
        elif isinstance(leaf, PLAIN):
            leaves.append(leaf)
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            named = {field.name: getattr(leaf, field.name) for field in fields(leaf) if field.init}
            inner, form = flatten(named)
            tensors.extend(inner)
            leaves.append(_Dataclass(type(leaf), form))
        else:
            raise ValueError(
                f"the model returns a {type(leaf).__name__}, which no skipped call can give",
            )
    return tuple(tensors), OutputForm(spec, tuple(leaves))


def rebuild(form: OutputForm, tensors: HeldTensors) -> object:
    """Return a result of a form, with these tensors in the order of `flatten`."""
    return _rebuild(form, iter(tensors))


def _rebuild(form: OutputForm, rest: Iterator[torch.Tensor]) -> object:
    # No inner function: one that calls itself would keep the tensors until a garbage collection.
    leaves: list[object] = []
    for leaf in form.leaves:
        if leaf is TENSOR:
            leaves.append(next(rest))
        elif isinstance(leaf, _Dataclass):
            named = cast("dict[str, object]", _rebuild(leaf.fields, rest))
            leaves.append(leaf.made(**named))
        else:
            leaves.append(leaf)
    return pytree.tree_unflatten(leaves, form.spec)


class HeldOutput(NamedTuple):
    """The output of a call, and its timestep."""

    time: float
    tensors: HeldTensors
    form: OutputForm

    def is_like(self, other: HeldOutput) -> bool:
        """Return whether two outputs differ in nothing but the values of their tensors."""
        own = [(tensor.shape, tensor.dtype, tensor.device) for tensor in self.tensors]
        others = [(tensor.shape, tensor.dtype, tensor.device) for tensor in other.tensors]
        return own == others and self.form == other.form


class HeldOutputs:
    """The last output that each guidance branch computed, or the last two.

    A skipped call at timestep t reuses the last one, v1, or extrapolates the line through both,
    ``v1 + share * (t - t1) / (t1 - t0) * (v1 - v0)``. In flow matching, where t is proportional to
    the noise and v is a velocity, that is a linear forecast in the solver's own variable. A result
    with several tensors is forecast tensor by tensor.
    """

    def __init__(self) -> None:
        self._held: dict[str, list[HeldOutput]] = {}

    def __contains__(self, branch: str) -> bool:
        return branch in self._held

    def hold(self, branch: str, time: float, result: object, *, both: bool = False) -> None:
        """Keep a copy of a branch's result, and the result before it only if asked to.

        Args:
            branch: name of the guidance branch.
            time: timestep of the call.
            result: what the model returned; see `flatten`.
            both: keep the result before, too, if it is of the same form.
        """
        tensors, form = flatten(result)
        copies = tuple(tensor.clone() for tensor in tensors)  # the caller may change them in place
        held = HeldOutput(time, copies, form)
        before = self._held.get(branch, [])[-1:] if both else []
        self._held[branch] = [*(item for item in before if item.is_like(held)), held]

    def drop(self, branch: str) -> None:
        """Forget the results of a branch."""
        self._held.pop(branch, None)

    def reach(self, branch: str, time: float) -> float:
        """Return the extrapolation distance of a timestep, in distances of the last two outputs.

        It is 0 without a line through two timesteps.
        """
        *before, last = self._held[branch]
        if not before or last.time == before[0].time:
            return 0.0
        return (time - last.time) / (last.time - before[0].time)

    def output(self, branch: str, reach: float = 0.0) -> object:
        """Return a new result: the last one of a branch plus a fraction of its last change."""
        *before, last = self._held[branch]
        if reach == 0.0:
            return rebuild(last.form, tuple(tensor.clone() for tensor in last.tensors))
        pairs = zip(before[0].tensors, last.tensors, strict=True)
        return rebuild(last.form, tuple(_forecast(old, new, reach) for old, new in pairs))


def _forecast(old: torch.Tensor, new: torch.Tensor, reach: float) -> torch.Tensor:
    if not new.is_floating_point():
        return new.clone()
    # Rounded once, to the dtype of the outputs.
    exact = torch.promote_types(new.dtype, torch.float32)
    last = new.to(exact)
    return (last + reach * (last - old.to(exact))).to(new.dtype)
