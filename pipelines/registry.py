"""Which adapter serves which transformer class: those of the modules in `pipelines/models`."""

from __future__ import annotations

import inspect
import pkgutil
from importlib import import_module
from inspect import Parameter
from typing import Any

from chipsparse.pipelines import models
from chipsparse.pipelines.adapter import ModelAdapter
from chipsparse.pipelines.other_classes import OTHER_CLASSES
from chipsparse.pipelines.patches import stock_class


def _collect() -> dict[str, type[ModelAdapter]]:
    modules = [
        import_module(f"{models.__name__}.{module.name}")
        for module in pkgutil.iter_modules(models.__path__)
    ]
    adapters = {
        item.transformer_class: item
        for module in modules
        for item in vars(module).values()
        if inspect.isclass(item)
        and issubclass(item, ModelAdapter)
        and "transformer_class" in vars(item)
    }
    return {name: adapters[name] for name in sorted(adapters)}


ADAPTERS: dict[str, type[ModelAdapter]] = _collect()


def adapter_class(transformer: Any) -> type[ModelAdapter]:
    """The adapter of a transformer that has one; see `find_adapter`."""
    adapter = find_adapter(transformer)
    assert adapter is not None
    return adapter


def find_adapter(transformer: Any) -> type[ModelAdapter] | None:
    """The adapter of a transformer's class; None where it has none.

    A subclass has that of the nearest class with one, unless it has a ``forward`` that does not
    take the arguments of this class.
    """
    made_of = stock_class(transformer)
    for model_class in made_of.__mro__:
        if (adapter := ADAPTERS.get(model_class.__name__)) is not None:
            return adapter if _takes_all(made_of, model_class) else None
    return None


def why_refused(transformer: Any) -> str:
    """Return why a transformer without an adapter is refused."""
    names = [model_class.__name__ for model_class in stock_class(transformer).__mro__]
    if (base := next((name for name in names if name in ADAPTERS), None)) is not None:
        return f"its forward does not take all arguments of that of {base}"
    return OTHER_CLASSES.get(names[0], "chipsparse has no adapter for it")


def _takes_all(model_class: Any, base: Any) -> bool:
    """Return whether the ``forward`` of a class takes all arguments of that of its base."""
    if model_class is base:
        return True
    taken, known = (inspect.signature(item.forward).parameters for item in (model_class, base))
    takes_any = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in taken.values())
    return takes_any or taken.keys() >= known.keys()
