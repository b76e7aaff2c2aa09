"""The feed-forward layers of diffusers models: which of them can run sparse, and how.

A layer runs sparse as one custom op that reads the live weights of its linears. Where something
else is in charge of a linear (an active adapter, a quantizer, an offloading hook), the modules
stay as diffusers made them and run dense. This is decided anew before every call, because adapters
and hooks come and go.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, Protocol

import torch
import torch.nn.functional as F

from chipsparse.layers.mlp_weights import Fp8MLPWeights, part_of
from chipsparse.pipelines.feed_forward_forms import (
    Form,
    activation_form,
    feed_forward_form,
    is_group_offloaded,
    linears,
    readable_form,
    why_hooked,
    without_adapters,
)
from chipsparse.pipelines.patches import TAG, Patches, stock_class


class FeedForwardSite(Protocol):
    """A place in a model where a feed-forward layer is."""

    def patch(self, patches: Patches, tag: torch.Tensor) -> None:
        """Prepares the modules; they compute as before until `run_as`."""

    def form(self) -> Form | str:
        """The form of the layer, or the reason why it cannot run sparse now."""

    def run_as(self, form: Form | None) -> None:
        """Runs the layer as one op from now on, or as diffusers made it."""

    def fp8_weights(self) -> Fp8MLPWeights:
        """The live weights of the linears of a layer whose form says that they are in FP8."""

    def second_linear(self) -> torch.nn.Linear:
        """The linear that holds the second weight."""

    def keeps_its_layout(self) -> bool:
        """Return whether the storage of the weights is not ours to change."""


def _prepare(module: Any, patches: Patches, tag: torch.Tensor) -> None:
    """Gives the module that will run as one op its tag, and settings to run as it was made."""
    patches.set_attribute(module, TAG, tag)
    patches.set_attribute(module, "chipsparse_activation", None)
    patches.set_attribute(module, "chipsparse_gate", "none")
    patches.set_attribute(module, "chipsparse_fp8", False)


def _run_as(module: Any, form: Form | None) -> None:
    """Sets what that module runs as."""
    module.chipsparse_activation = None if form is None else form.activation
    module.chipsparse_gate = "none" if form is None else form.gate
    module.chipsparse_fp8 = form is not None and form.fp8 is not None


def _runs_as_one(module: Any) -> bool:
    """Return whether a patched module does its part of a layer that runs as one op."""
    return module.chipsparse_activation is not None and not torch.is_grad_enabled()


class PatchedModule:
    """Mixin of a patched module that does something else where its layer runs as one op."""

    chipsparse_activation: str | None

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The output of the module as it was made, or of `chipsparse_forward`."""
        output: torch.Tensor
        if not isinstance(self, PatchedModule):  # restored, and hooks had kept this method
            output = type(self).forward(self, hidden_states, *args, **kwargs)
        elif _runs_as_one(self):
            output = self.chipsparse_forward(hidden_states)
        else:
            output = super().forward(hidden_states, *args, **kwargs)  # type: ignore[misc]
        return output

    def chipsparse_forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The output of the module where its layer runs as one op."""
        raise NotImplementedError


class PatchedFeedForward(PatchedModule):
    """Mixin of a patched feed-forward module: runs as one op where its weights can be read."""

    chipsparse_tag: torch.Tensor
    chipsparse_gate: str
    chipsparse_fp8: bool

    def chipsparse_forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Feed-forward for ``[B, N, C]``, or one sample ``[N, C]``."""
        if hidden_states.ndim == 2:
            return self.chipsparse_forward(hidden_states[None])[0]
        up, down, gate = linears(self)
        if self.chipsparse_fp8:
            return torch.ops.chipsparse.fp8_feed_forward(
                hidden_states, self.chipsparse_tag, down.out_features
            )
        return torch.ops.chipsparse.feed_forward(
            hidden_states,
            up.weight,
            up.bias,
            down.weight,
            down.bias,
            self.chipsparse_tag,
            self.chipsparse_activation,
            self.chipsparse_gate,
            None if gate is None else gate.weight,
            None if gate is None else gate.bias,
        )


class FeedForwardModule:
    """A module with two linears or, gated, three: diffusers' ``FeedForward``, or a model's own."""

    def __init__(self, block: Any, name: str) -> None:
        self._block = block
        self._name = name
        self._module = getattr(block, name)

    def patch(self, patches: Patches, tag: torch.Tensor) -> None:
        """Prepares the module; it computes as before until `run_as`."""
        _prepare(self._module, patches, tag)
        patches.set_class(self._module, PatchedFeedForward)

    def form(self) -> Form | str:
        """The form of the layer, or the reason why it cannot run sparse now."""
        if getattr(self._block, self._name) is not self._module:
            return "its module was replaced"
        if getattr(self._block, "_chunk_size", None) is not None:
            return "its block runs it in chunks"
        found = feed_forward_form(self._module)
        if isinstance(found, str):
            return found
        named = dict(zip(("first", "second", "gate's"), linears(self._module), strict=True))
        present = {name: linear for name, linear in named.items() if linear is not None}
        return readable_form(found, present)

    def run_as(self, form: Form | None) -> None:
        """Runs the layer as one op from now on, or as diffusers made it."""
        _run_as(self._module, form)

    def fp8_weights(self) -> Fp8MLPWeights:
        """The live weights of both linears in FP8."""
        up, down, gate = linears(self._module)
        return Fp8MLPWeights(
            up.weight,
            up.bias,
            down.weight,
            down.bias,
            self._module.chipsparse_activation,
            self._module.chipsparse_gate,
            None if gate is None else gate.weight,
            None if gate is None else gate.bias,
        )

    def second_linear(self) -> torch.nn.Linear:
        """The linear that holds the second weight."""
        return without_adapters(linears(self._module).down)

    def keeps_its_layout(self) -> bool:
        """Return whether the storage of the weights is not ours to change."""
        return is_group_offloaded(self._block) or is_group_offloaded(self._module)


class PatchedPassing(PatchedModule):
    """Mixin of a module that passes its input on, because a later one does its work."""

    def chipsparse_forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The input itself, ``[B, N, C]``."""
        return hidden_states


class PatchedParallelProjection(PatchedModule):
    """Mixin of a patched ``proj_out``: the feed-forward layer, and the projection, as one op."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    chipsparse_tag: torch.Tensor
    chipsparse_gate: str
    chipsparse_fp8: bool
    chipsparse_up: torch.nn.Linear

    def chipsparse_forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """``[B, N, C]`` from the attention output and the layer's input ``[B, N, A + C]``."""
        if self.chipsparse_fp8:
            return torch.ops.chipsparse.fp8_parallel_feed_forward(
                hidden_states, self.chipsparse_tag, self.weight.shape[0]
            )
        return torch.ops.chipsparse.parallel_feed_forward(
            hidden_states,
            self.chipsparse_up.weight,
            self.chipsparse_up.bias,
            self.weight,
            self.bias,
            self.chipsparse_tag,
            self.chipsparse_activation,
            self.chipsparse_gate,
        )


class ParallelFeedForward:
    """The feed-forward layer of a FLUX single block, which runs beside the attention.

    The block joins ``act_mlp(proj_mlp(x))`` to the attention output and gives both to one linear,
    ``proj_out``. To run the layer as one op, the first two pass x on, so that the block joins x
    itself to the attention output; ``proj_out`` takes them apart and computes the rest.
    """

    names: ClassVar[tuple[str, ...]] = ("proj_mlp", "act_mlp", "proj_out")

    def __init__(self, block: Any) -> None:
        self._block = block
        self._owner = self._find_owner(block)
        self._modules = [without_adapters(getattr(self._owner, name)) for name in self.names]

    @staticmethod
    def _find_owner(block: Any) -> Any:
        """The module that has the others."""
        return block

    def patch(self, patches: Patches, tag: torch.Tensor) -> None:
        """Prepares the modules; they compute as before until `run_as`."""
        up, activation, out = self._modules
        for module in (up, activation):
            patches.set_attribute(module, "chipsparse_activation", None)
        _prepare(out, patches, tag)
        patches.set_reference(out, "chipsparse_up", up)
        self._patch_first(patches)
        patches.set_class(activation, PatchedPassing)
        patches.set_class(out, PatchedParallelProjection)

    def _patch_first(self, patches: Patches) -> None:
        patches.set_class(self._modules[0], PatchedPassing)

    def form(self) -> Form | str:
        """The form of the layer, or the reason why it cannot run sparse now."""
        for name, module in zip(self.names, self._modules, strict=True):
            if without_adapters(getattr(self._owner, name)) is not module:
                return f"its {name} was replaced"
        first, activation, second = (getattr(self._owner, name) for name in self.names)
        form = activation_form(activation)
        if form is None:
            return f"its activation {stock_class(activation).__name__} is not supported"
        if reason := why_hooked("activation", activation):
            return reason
        return readable_form(form, {"first": first, "second": second})

    def run_as(self, form: Form | None) -> None:
        """Runs the layer as one op from now on, or as diffusers made it."""
        *before, out = self._modules
        for module in before:
            module.chipsparse_activation = None if form is None else form.activation
        _run_as(out, form)

    def fp8_weights(self) -> Fp8MLPWeights:
        """The live weights of both linears in FP8, whole, the attention's parts included."""
        up, _, out = self._modules
        return Fp8MLPWeights(
            up.weight,
            up.bias,
            out.weight,
            out.bias,
            out.chipsparse_activation,
            out.chipsparse_gate,
        )

    def second_linear(self) -> torch.nn.Linear:
        """The linear that holds the second weight."""
        linear: torch.nn.Linear = self._modules[2]
        return linear

    def keeps_its_layout(self) -> bool:
        """Return whether the storage of the weights is not ours to change."""
        return is_group_offloaded(self._block) or is_group_offloaded(self._owner)


class PatchedFusedProjection(PatchedModule):
    """Mixin of a linear for attention and feed-forward: the attention's part, then the input."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    chipsparse_rows: int

    def chipsparse_forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """``[B, N, R + C]``, R rows of the weight applied, from ``[B, N, C]``."""
        rows = self.chipsparse_rows
        bias = None if self.bias is None else self.bias[:rows]
        projected = F.linear(hidden_states, part_of(self.weight, slice(rows)), bias)
        # Autocast computes the one in another dtype than it was given.
        return torch.cat([projected, hidden_states.to(projected.dtype)], dim=-1)


class PatchedParallelAttention:
    """Mixin of the module around it, whose processor splits the projection by these widths."""

    query_dim: int

    @property
    def mlp_hidden_dim(self) -> int:
        """Neurons; where the input itself comes in their place, its channels."""
        neurons: int = self.__dict__["mlp_hidden_dim"]
        return self.query_dim if _runs_as_one(self) else neurons

    @property
    def mlp_mult_factor(self) -> int:
        """The number of rows of the projection that belong to a neuron."""
        rows: int = self.__dict__["mlp_mult_factor"]
        return 1 if _runs_as_one(self) else rows


class FusedParallelFeedForward(ParallelFeedForward):
    """The same in a FLUX.2 single block, whose first linear is one with the attention's.

    That linear computes q, k and v only and passes x on beside them. Both parts of it, and of the
    common projection, are views of its weights.
    """

    names: ClassVar[tuple[str, ...]] = ("to_qkv_mlp_proj", "mlp_act_fn", "to_out")
    processors: ClassVar[tuple[str, ...]] = (
        "Flux2ParallelSelfAttnProcessor",
        "Flux2KVParallelSelfAttnProcessor",
    )

    @staticmethod
    def _find_owner(block: Any) -> Any:
        return block.attn

    def _patch_first(self, patches: Patches) -> None:
        first = self._modules[0]
        patches.set_attribute(first, "chipsparse_rows", 3 * self._owner.inner_dim)
        patches.set_class(first, PatchedFusedProjection)
        patches.set_attribute(self._owner, "chipsparse_activation", None)
        patches.set_class(self._owner, PatchedParallelAttention)

    def run_as(self, form: Form | None) -> None:
        """Runs the layer and the attention that computes it as one op, or as diffusers made it."""
        super().run_as(form)
        self._owner.chipsparse_activation = None if form is None else form.activation

    def form(self) -> Form | str:
        """The form of the layer; dense if the attention's processor was replaced."""
        if stock_class(self._owner.processor).__name__ not in self.processors:
            return "the attention's processor, which computes it, was replaced"
        return super().form()


class PatchedHalves(PatchedModule):
    """Mixin of a linear for neurons and their gate: the layer's input, and ones as the gate."""

    def chipsparse_forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """``[B, N, 2 C]`` from ``[B, N, C]``."""
        return torch.cat([hidden_states, torch.ones_like(hidden_states)], dim=-1)


class PatchedGatedBlock:
    """Mixin of the block around it, which splits the linear's output in halves of this width."""

    proj_mlp: torch.nn.Linear

    @property
    def mlp_hidden_dim(self) -> int:
        """Neurons; where the input itself comes in their place, its channels."""
        neurons: int = self.__dict__["mlp_hidden_dim"]
        return self.proj_mlp.in_features if _runs_as_one(self) else neurons


class GatedParallelFeedForward(ParallelFeedForward):
    """The same in an Ovis-Image single block, which splits off the gate and applies it by itself.

    The first linear gives the input and ones; the activation passes these on, and the block
    multiplies by them.
    """

    def _patch_first(self, patches: Patches) -> None:
        patches.set_class(self._modules[0], PatchedHalves)
        patches.set_attribute(self._block, "chipsparse_activation", None)
        patches.set_class(self._block, PatchedGatedBlock)

    def run_as(self, form: Form | None) -> None:
        """Runs the layer and its block as one op, or as diffusers made them."""
        super().run_as(form)
        self._block.chipsparse_activation = None if form is None else form.activation

    def form(self) -> Form | str:
        """The form of the layer; the gate is the second half."""
        form = super().form()
        return form if isinstance(form, str) else replace(form, gate="second")
