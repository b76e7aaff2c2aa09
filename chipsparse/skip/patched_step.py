"""A scheduler's ``step`` with wrappers around it, which leave its attributes as they are."""

from __future__ import annotations

import copy
import copyreg
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from chipsparse.common.stock_like import BASE, StockLike, subclass_like
from chipsparse.skip.scheduler import Scheduler

Step = Callable[..., Any]
MEMBERS = ("__new__", "step", "__reduce_ex__", "__deepcopy__")  # of `PatchedStep`


class PatchedStep:
    """Members of the class of a scheduler object whose ``step`` has wrappers around it.

    The class is of this object alone, and holds the wrappers: as an attribute of the object, the
    step would go into its copies, and step the original. Copies, pickles and other instances are of
    the stock class.
    """

    chipsparse_base: Any  # the stock class
    chipsparse_wrappers: ClassVar[StepWrappers]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - mypy wants one of cls
        """Return an instance of the stock class: this one is of a single object."""
        return cls.chipsparse_base(*args, **kwargs)

    @property
    def step(self) -> Step:
        """The wrapped step: around the one that a user has set, or that of the stock class."""
        return self.chipsparse_wrappers.step_of(self)

    @step.setter
    def step(self, step: Step) -> None:
        vars(self)["step"] = step

    @step.deleter
    def step(self) -> None:
        if vars(self).pop("step", None) is None:
            raise AttributeError("step")

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        stock = self.chipsparse_base
        make, arguments, *rest = stock.__reduce_ex__(self, protocol)
        if make is copyreg.__newobj__:  # type: ignore[attr-defined]
            make = object.__new__  # pickle would want the object's own class for the former
        return (make, tuple(stock if item is type(self) else item for item in arguments), *rest)

    def __deepcopy__(self, memo: dict[int, Any]) -> object:
        twin = copy.copy(self)
        memo[id(self)] = twin
        vars(twin).update(copy.deepcopy(vars(self), memo))
        self.chipsparse_wrappers.tell_copied(twin)
        return twin


@dataclass(eq=False)
class _Wrapper:
    call: Step  # the wrapped step
    copied: Callable[[Any], None]  # is told each deep copy
    is_on: bool = True


class StepWrappers:
    """The wrappers around the step of one scheduler, which are taken off in any order."""

    def __init__(self, scheduler: Scheduler, stock: type) -> None:
        self.scheduler = scheduler
        self._stock = stock
        self._wrappers: list[_Wrapper] = []  # innermost first; some of the inner ones may be off
        self._is_inside = False  # the wrapped step is being called

    def add(
        self,
        wrap: Callable[[Step], Step],
        copied: Callable[[Any], None],
    ) -> Callable[[], None]:
        """Set a wrapper around the others; return what takes it off."""
        count = len(self._wrappers)

        def inner(*args: Any, **kwargs: Any) -> object:
            # It is looked up at each call: a user may set another step, and wrappers go.
            return self._step_within(count)(*args, **kwargs)

        wrapper = _Wrapper(wrap(inner), copied)
        self._wrappers.append(wrapper)
        return functools.partial(self._remove, wrapper)

    def step_of(self, owner: object) -> Step:
        """Return the step of an object with the scheduler's class, wrapped if it is that one."""
        own = self._own_step(owner)
        if owner is not self.scheduler or not self._wrappers:
            return own

        @functools.wraps(own)  # its signature, which pipelines inspect
        def step(*args: Any, **kwargs: Any) -> object:
            # A user may set a step around this one. The wrappers are then around both.
            if self._is_inside or not self._wrappers:
                return own(*args, **kwargs)
            self._is_inside = True
            try:
                return self._step_within(len(self._wrappers))(*args, **kwargs)
            finally:
                self._is_inside = False

        return step

    def tell_copied(self, twin: object) -> None:
        """Tell the wrappers of a deep copy, unless it is made within the step, by a user's own."""
        if not self._is_inside:
            for wrapper in self._wrappers:
                if wrapper.is_on:
                    wrapper.copied(twin)

    def _own_step(self, owner: object) -> Step:
        set_by_user: Step | None = vars(owner).get("step")
        if set_by_user is not None:
            return set_by_user
        bound: Step = inspect.getattr_static(self._stock, "step").__get__(owner)
        return bound

    def _step_within(self, count: int) -> Step:
        """Return the scheduler's step with its innermost wrappers, `count` of them, around it."""
        for wrapper in reversed(self._wrappers[:count]):
            if wrapper.is_on:
                return wrapper.call
        return self._own_step(self.scheduler)

    def _remove(self, wrapper: _Wrapper) -> None:
        """Take a wrapper off; with the last one the scheduler gets its stock class back."""
        wrapper.is_on = False
        while self._wrappers and not self._wrappers[-1].is_on:
            self._wrappers.pop()
        if not self._wrappers and wrappers_of(self.scheduler) is self:
            self.scheduler.__class__ = self._stock


def wrappers_of(scheduler: Scheduler) -> StepWrappers | None:
    """Return the wrappers around the step of a scheduler object; None without any."""
    wrappers: StepWrappers | None = getattr(type(scheduler), "chipsparse_wrappers", None)
    return wrappers if wrappers is not None and wrappers.scheduler is scheduler else None


def wrap_step(
    scheduler: Scheduler,
    wrap: Callable[[Step], Step],
    copied: Callable[[Any], None] = lambda _: None,
) -> Callable[[], None]:
    """Set a wrapper around the step of one scheduler object, whose copies and pickles are stock.

    The object gets a subclass of its class, under the same name. Its attributes stay what they are.

    Args:
        scheduler: any object of a class with a ``step``; the object may have a step of its own.
        wrap: returns what is called in place of the step that it is given.
        copied: is told each deep copy: some pipelines make one for a second kind of latents.

    Returns:
        A function that takes the wrapper off, also if more were set around it since.
    """
    wrappers = wrappers_of(scheduler)
    if wrappers is not None:
        return wrappers.add(wrap, copied)
    stock = getattr(type(scheduler), BASE, type(scheduler))
    wrappers = StepWrappers(scheduler, stock)
    take_off = wrappers.add(wrap, copied)
    # With a mixin in front, Python would refuse the class for objects of some abstract ones: it
    # compares where in the bases the attributes begin.
    members = {name: vars(PatchedStep)[name] for name in MEMBERS}
    patched = subclass_like(stock, StockLike, **members, chipsparse_wrappers=wrappers)
    scheduler.__class__ = patched
    return take_off
