"""Changes on a model that can all be taken back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from chipsparse.common.stock_like import BASE, StockLike, subclass_like

TAG = "chipsparse_tag"  # of a layer: its tag
RUNNER = "chipsparse_runner"  # of a transformer: its runner


class Patches:
    """A list of undo steps, taken in reverse."""

    def __init__(self) -> None:
        self.hook_numbers: set[int] = set()  # PyTorch's, of the hooks among the changes
        self._undo: list[Callable[[], None]] = []

    def undo(self) -> None:
        """Takes every change back; a second call does nothing."""
        while self._undo:
            self._undo.pop()()

    def set_attribute(self, target: Any, name: str, value: Any) -> None:
        """Set an attribute of an instance; undoing restores the former one, or deletes it."""
        had = name in vars(target)
        old = vars(target).get(name)
        setattr(target, name, value)
        self.add_undo(lambda: setattr(target, name, old) if had else delattr(target, name))

    def replace_attribute(self, target: Any, name: str, value: Any) -> None:
        """Sets an attribute that there is; what somebody sets in its place later, stays."""
        old = getattr(target, name)
        setattr(target, name, value)

        def restore() -> None:
            if getattr(target, name) is value:
                setattr(target, name, old)

        self.add_undo(restore)

    def set_class(self, target: Any, mixin: type) -> None:
        """Gives an object a subclass of its class with the mixin in front, under the same name."""
        base: type = type(target)
        target.__class__ = _subclass(mixin, base)
        self.add_undo(lambda: setattr(target, "__class__", base))

    def add_hook(self, handle: Any) -> None:
        """Note a hook that was registered: it counts as ours, and undoing removes it."""
        self.hook_numbers.add(handle.id)
        self.add_undo(handle.remove)

    def add_undo(self, step: Callable[[], None]) -> None:
        """Note what takes a change back; it is called before the steps that were noted earlier."""
        self._undo.append(step)


class WholePatched(metaclass=StockLike):
    """Mixin of patched objects that users hold, pipelines and transformers, as opposed to layers.

    The class has one object, while that is patched. New instances are of the stock class. Copies
    and pickles would share or lose our state, so they are refused.
    """

    chipsparse_base: Any

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return an instance of the stock class: this one is of a single object."""
        return cls.chipsparse_base(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"cannot copy or pickle this {type(self).__name__} while chipsparse has it patched; "
            "call chipsparse.disable(pipe) first and enable it again afterwards "
            "(save_pretrained works as it is)",
        )


@functools.cache  # one class for all layers and experts: compiled blocks share one graph
def _subclass(mixin: type, base: type) -> type:
    return subclass_like(base, type(mixin), mixin)


def stock_class(target: Any) -> type:
    """The class that an object had before `Patches.set_class`."""
    return getattr(type(target), BASE, type(target))
