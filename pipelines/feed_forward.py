"""The feed-forward layers of diffusers models: which of them can run sparse, and how.

A layer runs sparse as one custom op. The op gets the layer's tag and fetches the live weights from
the `FeedForwardSite` of that layer. If something else is in charge of a linear (an active adapter,
a quantizer, an offloading hook), the modules stay as diffusers made them and run dense. This is
decided anew before every call, because adapters and hooks come and go.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from chipsparse.pipelines.diffusers_hooks import GROUP_OFFLOADING, hooks_on
from chipsparse.pipelines.feed_forward_forms import (
    Form,
    Linears,
    MLPParts,
    activation_form,
    feed_forward_form,
    linears_of,
    readable_form,
    why_hooked,
    without_adapters,
)
from chipsparse.pipelines.patches import TAG, Patches, stock_class
from chipsparse.sparse.layers.mlp_weights import Fp8MLPWeights, MLPWeights, part_of

AS_ONE = "chipsparse_as_one"


def runs_as_one(module: Any) -> bool:
    """Return whether a patched module does its part of a layer that runs as one op."""
    return module.chipsparse_as_one and not torch.is_grad_enabled()


class PatchedModule:
    """Mixin of a patched module that does something else where its layer runs as one op."""

    chipsparse_as_one: bool
    chipsparse_base: type

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Let copies and pickles be stock: they have weights of their own, which no site reads."""
        reduced: Any = super().__reduce_ex__(protocol)
        _, _, state, *rest = reduced
        own = {name: value for name, value in state.items() if name not in (AS_ONE, TAG)}
        # Not `copyreg.__newobj__`, with which pickle wants the object's own class.
        return (object.__new__, (self.chipsparse_base,), own, *rest)

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The output of the module as it was made, or of `chipsparse_forward`."""
        if not isinstance(self, PatchedModule):  # restored, and hooks had kept this method
            return type(self).forward(self, hidden_states, *args, **kwargs)
        if runs_as_one(self):
            return self.chipsparse_forward(hidden_states)
        return super().forward(hidden_states, *args, **kwargs)  # type: ignore[misc]

    def chipsparse_forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The output of the module where its layer runs as one op: here the input ``[B, N, C]``."""
        return hidden_states


class FeedForwardSite:
    """The modules of a model that make up one feed-forward layer.

    The offloading of the modules around its linears brings the weights. Each patched module has its
    mixin, and the last one calls the op.
    """

    def __init__(self, around: Sequence[Any], patched: Sequence[tuple[Any, type]]) -> None:
        self._around = around
        self._patched = patched
        self._form: Form | None = None

    def patch(self, patches: Patches, tag: torch.Tensor) -> None:
        """Prepares the modules; they compute as before until `run_as`."""
        for module, mixin in self._patched:
            patches.set_attribute(module, AS_ONE, False)
            patches.set_class(module, mixin)
        patches.set_attribute(self._patched[-1][0], TAG, tag)

    def linears(self) -> Linears:
        """The linears of the layer now; an adapter around one may be part of it."""
        raise NotImplementedError

    def form(self) -> Form | str:
        """The form of the layer, or the reason why it cannot run sparse now."""
        raise NotImplementedError

    def run_as(self, form: Form | None) -> None:
        """Runs the layer as one op from now on, or with None as diffusers made it."""
        self._form = form
        for module, _ in self._patched:
            setattr(module, AS_ONE, form is not None)

    @contextlib.contextmanager
    def released(self) -> Iterator[None]:
        """Within: the layer runs as diffusers made it."""
        form = self._form
        self.run_as(None)
        try:
            yield
        finally:
            self.run_as(form)

    def weights(self, dtype: torch.dtype | None) -> MLPWeights | Fp8MLPWeights:
        """The live weights, in the dtype of ``torch.autocast`` where it is on, unless in FP8."""
        up, down, gate = self.linears()
        gate_weights = () if gate is None else (gate.weight, gate.bias)
        return self._made((up.weight, up.bias), (down.weight, down.bias), gate_weights, dtype)

    def _made(
        self,
        up: Any,
        down: Any,
        gate: Any,
        dtype: torch.dtype | None,
    ) -> MLPWeights | Fp8MLPWeights:
        """The weights of linears, of which each is a weight and a bias or None."""
        form = self._form
        assert form is not None
        make: Callable[..., MLPWeights | Fp8MLPWeights] = Fp8MLPWeights
        if form.fp8 is None:
            make = MLPWeights.from_linears
            up, down, gate = ([autocast(part, dtype) for part in pair] for pair in (up, down, gate))
        return make(*up, *down, form.activation, form.gate, *gate)

    def second_linear(self) -> torch.nn.Linear:
        """Return the module of the second linear, without the adapters around it."""
        return without_adapters(self.linears().down)

    def keeps_its_layout(self) -> bool:
        """Return whether the storage of the weights is not ours: diffusers brings it for a call."""
        return any(GROUP_OFFLOADING in hooks_on(module) for module in self._around)


def autocast(tensor: Any, dtype: torch.dtype | None) -> Any:
    """A tensor or None as ``torch.autocast`` gives it to a linear, with the strides that it had.

    Tensors in float64 or without a fraction stay as they are. Autocast keeps copies of the weights
    that linears use, but hands them to nobody.
    """
    if tensor is None or dtype is None:
        return tensor
    casts = tensor.is_floating_point() and tensor.dtype != torch.float64
    return tensor.to(dtype) if casts else tensor


class PatchedFeedForward(PatchedModule):
    """Mixin of a patched feed-forward module: runs as one op where its weights can be read."""

    chipsparse_tag: torch.Tensor

    def chipsparse_forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Feed-forward for ``[B, N, C]``, or one sample ``[N, C]``."""
        if hidden_states.ndim == 2:
            return self.chipsparse_forward(hidden_states[None])[0]
        return torch.ops.chipsparse.feed_forward(hidden_states, self.chipsparse_tag)


class FeedForwardModule(FeedForwardSite):
    """A module of a block, with two linears or, gated, three."""

    def __init__(self, block: Any, name: str, parts: MLPParts | None = None) -> None:
        self._block = block
        self._name = name
        self._parts = parts
        self._module = getattr(block, name)
        super().__init__((block, self._module), [(self._module, PatchedFeedForward)])

    def linears(self) -> Linears:
        """Return the module's linears as they are now, adapters included."""
        return linears_of(self._module, self._parts)

    def form(self) -> Form | str:
        """Return the layer's form; a string is the reason why it cannot run sparse now."""
        if getattr(self._block, self._name) is not self._module:
            return "its module was replaced"
        if getattr(self._block, "_chunk_size", None) is not None:
            return "its block runs it in chunks"
        form = feed_forward_form(self._module, self._parts)
        if isinstance(form, str):
            return form
        named = dict(zip(("first", "second", "gate's"), self.linears(), strict=True))
        present = {name: linear for name, linear in named.items() if linear is not None}
        return readable_form(form, present)


class PatchedParallelProjection(PatchedModule):
    """Mixin of a patched ``proj_out``: the feed-forward layer, and the projection, as one op."""

    chipsparse_tag: torch.Tensor
    out_features: int

    def chipsparse_forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """``[B, N, C]`` from the attention output and the layer's input ``[B, N, A + C]``."""
        return torch.ops.chipsparse.parallel_feed_forward(
            hidden_states,
            self.chipsparse_tag,
            self.out_features,
        )


class PatchedOwner:
    """Mixin of the module around the linears, which splits what the first gives by its widths."""

    chipsparse_width: int  # channels of the layer's input

    @property
    def mlp_hidden_dim(self) -> int:
        """The number of neurons; for an input that is passed on instead, its channels."""
        return self.chipsparse_width if runs_as_one(self) else self.__dict__["mlp_hidden_dim"]

    @property
    def mlp_mult_factor(self) -> int:
        """The number of rows of the projection that belong to a neuron."""
        return 1 if runs_as_one(self) else self.__dict__["mlp_mult_factor"]


class ParallelFeedForward(FeedForwardSite):
    """The feed-forward layer of a FLUX single block, which runs beside the attention.

    The block joins ``act_mlp(proj_mlp(x))`` to the attention output and gives both to one linear,
    ``proj_out``. To run the layer as one op, the first two pass x on, so that the block joins x
    itself to the attention output; ``proj_out`` separates both and computes the rest.
    """

    owner: ClassVar[str] = ""  # the block's module that has them; here the block itself
    names: ClassVar[tuple[str, ...]] = ("proj_mlp", "act_mlp", "proj_out")
    first: ClassVar[type] = PatchedModule  # mixin of the first of them
    owner_splits: ClassVar[bool] = False  # what the first one gives, into attention and neurons

    def __init__(self, block: Any) -> None:
        self._owner = block.get_submodule(self.owner)
        self._modules = [without_adapters(getattr(self._owner, name)) for name in self.names]
        mixins = (self.first, PatchedModule, PatchedParallelProjection)
        owner = [(self._owner, PatchedOwner)] if self.owner_splits else []
        super().__init__((block, self._owner), [*owner, *zip(self._modules, mixins, strict=True)])

    def patch(self, patches: Patches, tag: torch.Tensor) -> None:
        """Prepare the modules, and set the width of the input where their owner splits by it."""
        if self.owner_splits:
            width = self._modules[0].in_features
            patches.set_attribute(self._owner, "chipsparse_width", width)
        super().patch(patches, tag)

    def linears(self) -> Linears:
        """Both linears, whole: the attention's parts are included."""
        up, _, out = self._modules
        return Linears(up, out)

    def parallel_weights(
        self,
        width: int,
        dtype: torch.dtype | None,
    ) -> tuple[MLPWeights | Fp8MLPWeights, torch.Tensor, torch.Tensor | None]:
        """The live weights of the layer, and weight and bias of the attention's projection.

        If the first linear is one with the attention's projections, their rows come before. The
        common projection has the attention's `width` columns, then the neurons'.
        """
        up, out, _ = self.linears()
        assert self._form is not None
        halves = 1 if self._form.gate == "none" else 2
        own = slice(-(out.weight.shape[1] - width) * halves, None)
        first = part_of(up.weight, own), None if up.bias is None else up.bias[own]
        second = part_of(out.weight, columns=slice(width, None)), None
        weights = self._made(first, second, (), dtype)
        projection = part_of(out.weight, columns=slice(width))
        bias = out.bias
        if self._form.fp8 is None:
            projection = autocast(projection, dtype)
            bias = autocast(bias, dtype)
        return weights, projection, bias

    def form(self) -> Form | str:
        """Return the layer's form, or the reason why one of its modules cannot run sparse now."""
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


class FusedParallelFeedForward(ParallelFeedForward):
    """The same in a FLUX.2 single block, whose first linear is one with the attention's.

    That linear computes q, k and v only and passes x on beside them. Both parts of it, and of the
    common projection, are views of its weights.
    """

    owner: ClassVar[str] = "attn"
    names: ClassVar[tuple[str, ...]] = ("to_qkv_mlp_proj", "mlp_act_fn", "to_out")
    first: ClassVar[type] = PatchedFusedProjection
    owner_splits: ClassVar[bool] = True
    processors: ClassVar[tuple[str, ...]] = (
        "Flux2ParallelSelfAttnProcessor",
        "Flux2KVParallelSelfAttnProcessor",
    )

    def patch(self, patches: Patches, tag: torch.Tensor) -> None:
        """Also notes which rows of the first linear are the attention's."""
        patches.set_attribute(self._modules[0], "chipsparse_rows", 3 * self._owner.inner_dim)
        super().patch(patches, tag)

    def form(self) -> Form | str:
        """Return the form; replaced attention processors are a further reason to run dense."""
        if stock_class(self._owner.processor).__name__ not in self.processors:
            return "the attention's processor, which computes it, was replaced"
        return super().form()


class PatchedHalves(PatchedModule):
    """Mixin of a linear for neurons and their gate: the layer's input, and ones as the gate."""

    def chipsparse_forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """``[B, N, 2 C]`` from ``[B, N, C]``."""
        return torch.cat([hidden_states, torch.ones_like(hidden_states)], dim=-1)


class GatedParallelFeedForward(ParallelFeedForward):
    """The same in an Ovis-Image single block, which splits off the gate and applies it by itself.

    The first linear gives the input and ones; the activation passes these on, and the block
    multiplies by them.
    """

    first: ClassVar[type] = PatchedHalves
    owner_splits: ClassVar[bool] = True

    def form(self) -> Form | str:
        """Return the form, with the gate in the second half of the first linear."""
        form = super().form()
        return form if isinstance(form, str) else replace(form, gate="second")
