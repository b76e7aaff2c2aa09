"""A scheduler's ``step`` with something around it, of which the scheduler itself keeps nothing."""

from __future__ import annotations

import copy
import copyreg
import functools
import inspect
from collections.abc import Callable
from typing import Any

from chipsparse.common.stock_like import BASE, StockLike

Step = Callable[..., Any]


def wrap_step(
    scheduler: Any,
    wrap: Callable[[Step], Step],  # of the object's own step, be it the user's
    # Is told each deep copy: some pipelines make one for a second kind of latents.
    copied: Callable[[Any], None] = lambda _: None,
) -> Callable[[], None]:
    """Wraps the step of one scheduler object, whose copies and pickles are stock.

    The object gets a subclass of its class, under the same name; its attributes stay what they are.
    Returns what takes the wrapping back, also where more was wrapped around it since.
    """
    base: Any = type(scheduler)
    stock = getattr(base, BASE, base)
    inner = inspect.getattr_static(base, "step")
    active = True
    inside = False

    def own(owner: Any) -> Any:
        set_by_user = None if isinstance(inner, property) else vars(owner).get("step")
        return set_by_user or inner.__get__(owner)

    def read(owner: Any) -> Any:
        now = own(owner)
        if owner is not scheduler or not active:
            return now

        @functools.wraps(now)  # its signature, at which pipelines look
        def step(*args: Any, **kwargs: Any) -> Any:
            nonlocal inside
            if inside or not active:  # what a user's step was set around
                return now(*args, **kwargs)
            inside = True
            try:
                return call(*args, **kwargs)
            finally:
                inside = False

        vars(step)["_call"] = call
        return step

    def drop_own(owner: Any) -> None:
        if vars(owner).pop("step", None) is None:
            raise AttributeError("step")

    def reduced(owner: Any, protocol: Any) -> Any:
        make, arguments, *rest = base.__reduce_ex__(owner, protocol)
        if make is copyreg.__newobj__:  # type: ignore[attr-defined]  # pickle wants owner's class
            make = object.__new__
        return (make, tuple(stock if item is wrapping else item for item in arguments), *rest)

    def deep_copied(owner: Any, memo: dict[int, Any]) -> Any:
        memo[id(owner)] = twin = copy.copy(owner)
        vars(twin).update(copy.deepcopy(vars(owner), memo))
        if not inside:  # none that a step of the user's own makes
            copied(twin)
        return twin

    def undo() -> None:
        nonlocal active
        active = False
        while not getattr(type(scheduler), "is_wrapping", lambda: True)():
            scheduler.__class__ = type(scheduler).__base__

    # The step is looked up at each call: a user may set another one.
    call = wrap(lambda *args, **kwargs: own(scheduler)(*args, **kwargs))  # noqa: PLW0108
    members: dict[str, Any] = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "__new__": lambda _, *args, **kwargs: stock(*args, **kwargs),
        "__reduce_ex__": reduced,
        "__deepcopy__": deep_copied,
        "step": property(read, lambda owner, step: vars(owner).update(step=step), drop_own),
        "is_wrapping": staticmethod(lambda: active),
        BASE: stock,
    }
    kind = type(base)
    if not issubclass(kind, StockLike):  # of an abstract class, for instance, have it as well
        kind = StockLike if kind is type else type("StockLike", (StockLike, kind), {})
    wrapping: Any = kind(base.__name__, (base,), members)
    scheduler.__class__ = wrapping
    return undo
