"""The forms of feed-forward layers of diffusers models; do their weights say it all?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from chipsparse.kernels.calls import Activation
from chipsparse.kernels.checks import FLOATING
from chipsparse.layout import Fp8Form
from chipsparse.pipelines.diffusers_hooks import hooks_on
from chipsparse.pipelines.patches import Patches, stock_class
from chipsparse.sparse.layers.mlp_weights import Gate, fp8_form

# By what PyTorch calls it.
GELU: Mapping[str, Activation] = MappingProxyType({"tanh": "gelu-tanh", "none": "gelu"})


@dataclass(frozen=True)
class Form:
    """The computation of a feed-forward layer between its linears."""

    activation: Activation
    gate: Gate = "none"
    fp8: Fp8Form | None = None  # None where its weights are not in FP8


class Linears(NamedTuple):
    """The linears of a feed-forward module; an adapter around one is part of it."""

    up: Any
    down: Any
    gate: Any = None


@dataclass(frozen=True)
class MLPParts:
    """The names of the parts of a family's own feed-forward modules."""

    up: str
    down: str
    gate: str | None = None  # a linear of its own, where the gate is no half of the first
    activation: str | None = None  # a module; None where the class itself applies SiLU


def linears_of(module: Any, parts: MLPParts | None) -> Linears:
    """The linears of a feed-forward module; without named parts, of diffusers' ``FeedForward``."""
    if parts is None:
        return Linears(module.net[0].proj, module.net[2])
    gate = None if parts.gate is None else getattr(module, parts.gate, None)
    return Linears(getattr(module, parts.up), getattr(module, parts.down), gate)


def feed_forward_form(module: Any, parts: MLPParts | None = None) -> Form | str:
    """The form of a feed-forward module, or the reason why it is not supported."""
    if parts is not None and parts.activation is None:
        return Form("silu", "apart")
    if parts is not None:
        first = getattr(module, parts.activation or "")
        form = activation_form(first)
        if form is not None and linears_of(module, parts).gate is not None:
            form = Form(form.activation, "apart")
    else:
        first = module.net[0]
        ends = all(isinstance(layer, torch.nn.Dropout) for layer in module.net[3:])
        form = _first_layer_form(first) if ends else None
    if form is None:
        name = getattr(module, "hidden_act", type(first).__name__)  # one may be no module
        return f"its activation {name} is not supported"
    return why_hooked("activation", first) or form


def _first_layer_form(first: Any) -> Form | None:
    """The form of diffusers' module of a first linear and its activation."""
    name = type(first).__name__
    if name == "GELU":
        return Form(GELU[first.approximate])
    if name == "GEGLU":
        return Form("gelu", "second")
    form = activation_form(first.activation) if name in ("SwiGLU", "LinearActivation") else None
    return replace(form, gate="second") if form is not None and name == "SwiGLU" else form


def activation_form(module: Any) -> Form | None:
    """The form of a module that may be a gated activation, None where we have no kernel."""
    made_of = stock_class(module)
    if made_of.__name__ in ("Flux2SwiGLU", "Flux3SwiGLU"):
        return Form("silu", "first")
    if made_of is torch.nn.SiLU:
        return Form("silu")
    return Form(GELU[module.approximate]) if made_of is torch.nn.GELU else None


# Whether a linear's weight is what the linear computes with.


def without_adapters(module: Any) -> Any:
    """The module inside PEFT's adapter layers, or the module itself."""
    while hasattr(module, "base_layer"):
        module = module.base_layer
    return module


def readable_form(form: Form, linears: Mapping[str, Any]) -> Form | str:
    """The form with what its linears round to FP8, or why the weight of one is unreadable."""
    for name, linear in linears.items():
        if reason := why_unreadable(name, linear):
            return reason
    fp8 = {fp8_form(linear.weight) for linear in linears.values()}
    if len(fp8) > 1:
        return "its weights are not all in FP8, or not all in the same way"
    return replace(form, fp8=fp8.pop())


def why_unreadable(name: str, linear: Any) -> str | None:
    """Return why a linear does not compute what its weight says, or None."""
    while hasattr(linear, "base_layer"):
        if not hasattr(linear, "adapter_layer_names"):  # not one of PEFT's: nothing known about it
            break
        if linear.merged and linear.disable_adapters:
            return f"its {name} linear has a fused adapter that was disabled"
        active = [] if linear.merged or linear.disable_adapters else _adapters(linear)
        if active:
            return f"its {name} linear has an active adapter that is not fused: {active[0]}"
        if reason := why_hooked(f"{name} linear", linear):
            return reason
        linear = linear.base_layer
    if hasattr(linear, "base_layer") or not hasattr(linear, "weight"):
        return f"its {name} linear is of class {type(linear).__name__} (an adapter, or quantized)"
    if type(linear.weight) is not torch.nn.Parameter and fp8_form(linear.weight) is None:
        return f"the weight of its {name} linear is a {type(linear.weight).__name__}"
    if linear.weight.dtype not in FLOATING:
        return f"the weight of its {name} linear is of type {linear.weight.dtype}"
    if stock_class(linear) is not torch.nn.Linear:
        return f"its {name} linear is of class {type(linear).__name__} (an adapter, or quantized)"
    return why_hooked(f"{name} linear", linear)


def _adapters(layer: Any) -> list[str]:
    """The active adapters of a PEFT layer that this layer has weights of."""
    own = {key for name in layer.adapter_layer_names for key in getattr(layer, name, {})}
    return [name for name in layer.active_adapters if name in own]


def why_hooked(name: str, module: Any) -> str | None:
    """Return why a module may compute or hold something else while it runs, or None."""
    hooked = hasattr(module, "_hf_hook") or hooks_on(module)
    if hooked or module._forward_hooks or module._forward_pre_hooks:
        return f"its {name} has hooks of its own (offloading or casting)"
    return None


# Storage of the second weight.


def has_contiguous_channels(linear: torch.nn.Linear) -> bool:
    """Return whether the weight ``[C, F]`` holds the channels of a neuron side by side."""
    return linear.weight.stride(0) == 1


def make_channels_contiguous(linear: torch.nn.Linear, patches: Patches) -> None:
    """Turns the storage of a weight ``[C, F]`` around: the same parameter with the same values.

    The kernels gather whole neurons, which are columns here. A dense product reads either layout
    equally fast, and moves between devices keep it.
    """

    def lay_out(turned: Callable[[torch.Tensor], torch.Tensor]) -> None:
        weight = linear.weight
        # It stays of its kind: one that is made in inference mode has no gradient, and no weight of
        # the one kind can hold the memory of the other.
        with torch.inference_mode(weight.is_inference()):
            weight.data = turned(weight.data)

    lay_out(lambda weight: weight.t().contiguous().t())
    patches.add_undo(lambda: lay_out(torch.Tensor.contiguous))
