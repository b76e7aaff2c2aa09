"""Refuses transformers in a wrapper, and transformers whose weights are shared among processes."""

from __future__ import annotations

from typing import Any

import torch

SHARDED_MODULES = frozenset({"FSDPModule", "FullyShardedDataParallel"})
SHARDED_WEIGHTS = frozenset({"DTensor"})


def why_wrapped(name: str, model: Any) -> str | None:
    """Return why a model in a wrapper is refused, with what takes it out; else None.

    Args:
        name: the pipeline's name for the model.
        model: the pipeline's component, of any kind, for whose class there is no adapter.
    """
    whole = f"pipe.{name}"
    if not isinstance(model, torch.nn.Module):
        return None
    if hasattr(model, "get_base_model"):  # PEFT's
        remedy = f"{whole}.get_base_model(), or with its adapters merged {whole}.merge_and_unload()"
    elif hasattr(model, "module"):  # DistributedDataParallel, DataParallel, engines of trainers
        remedy = f"{whole}.module"
    else:
        return None
    kind = type(model).__name__
    return f"{name} is in a {kind}, which chipsparse cannot patch; take it out: {whole} = {remedy}"


def check_whole(name: str, model: torch.nn.Module) -> None:
    """Refuses a model whose weights are sharded.

    Args:
        name: the pipeline's name for the model.
        model: the model, in a wrapper or not.

    Raises:
        ValueError: if this process has only its shard of the weights.
    """
    if is_sharded(model):
        raise ValueError(
            f"the weights of {name} are sharded (by FSDP or tensor parallelism), and chipsparse "
            "needs whole ones; load the model anew, or load_state_dict() into a plain one what "
            "torch.distributed.checkpoint.state_dict.get_model_state_dict() gathers with "
            "full_state_dict=True",
        )


def is_sharded(model: torch.nn.Module) -> bool:
    """Return whether a process has only its shard of a model's weights."""
    modules = {type(module) for module in model.modules()}
    weights = {type(weight) for weight in model.parameters()}
    return bool(_names(modules) & SHARDED_MODULES or _names(weights) & SHARDED_WEIGHTS)


def _names(kinds: set[type]) -> set[str]:
    return {base.__name__ for kind in kinds for base in kind.__mro__}
