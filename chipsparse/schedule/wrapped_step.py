"""A scheduler's ``step`` with something around it, for as long as it is asked for."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator
from typing import Any

Step = Callable[..., Any]
Wrap = Callable[[Any, Step], Step]


class WrappedStep:
    """What stands in the place of the ``step`` of one scheduler object.

    It has the signature of that, at which pipelines look. Some of them copy their scheduler,
    deeply, for a second kind of latents: the copy's step is its own.

    Args:
        scheduler: of diffusers.
        step: its step.
        wrap: makes what is called instead, from the scheduler and its step.
        copies: whether the steps of copies are wrapped likewise, or as their class has them.
    """

    def __init__(self, scheduler: Any, step: Step, wrap: Wrap, *, copies: bool) -> None:
        self._scheduler, self._wrap, self._copies = scheduler, wrap, copies
        self._call = wrap(scheduler, step)
        self.__signature__ = inspect.signature(step)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As what stands in its place."""
        return self._call(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Step:
        scheduler = copy.deepcopy(self._scheduler, memo)
        step: Step = type(scheduler).step.__get__(scheduler)
        return WrappedStep(scheduler, step, self._wrap, copies=True) if self._copies else step


@contextlib.contextmanager
def wrapped_step(scheduler: Any, wrap: Wrap, *, copies: bool = False) -> Iterator[None]:
    """Wraps the step of a scheduler for the length of the context; see `WrappedStep`."""
    own = vars(scheduler).get("step")
    scheduler.step = WrappedStep(scheduler, scheduler.step, wrap, copies=copies)
    try:
        yield
    finally:
        if own is None:
            del scheduler.step  # the instance's; that of its class is there again
        else:
            scheduler.step = own
