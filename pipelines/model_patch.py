"""The changes on a transformer's layers: tags, routed attention, feed-forward layers as one op.

All of them go through `Patches`, which takes them back.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from diffusers.models import attention_dispatch

from chipsparse.config import SparsityConfig
from chipsparse.pipelines.execution import Execution
from chipsparse.pipelines.family import Family
from chipsparse.pipelines.feed_forward import FeedForwardSite
from chipsparse.pipelines.feed_forward_forms import (
    Form,
    has_contiguous_channels,
    make_channels_contiguous,
)
from chipsparse.pipelines.ops import (
    attention_backend,
    forward_arguments,
    is_claimed,
    make_tag,
    tagging_hook,
)
from chipsparse.pipelines.parallel.context_parallel import take_off
from chipsparse.pipelines.parallel.split_sequence import CUT, CutAtEntry
from chipsparse.pipelines.patches import TAG, Patches
from chipsparse.pipelines.token_order import TokenOrder

# Backends of diffusers that are kernels of PyTorch, exact as ours.
PYTORCH_ATTENTION = ("native", "_native_cudnn", "_native_efficient", "_native_flash")


class ModelPatch:
    """Patches the layers of one transformer; `undo` restores it bit for bit."""

    def __init__(
        self,
        family: Family,
        transformer: torch.nn.Module,
        config: SparsityConfig,
        patches: Patches,  # for changes that stay until `undo`
    ) -> None:
        self._family = family
        self._transformer = transformer
        self._config = config
        self._patches = patches
        self._attention_patches = Patches()
        self._layouts = Patches()  # of weights that were laid out for the kernels
        self._unpatched_backends: list[Any] = []
        self._processors: list[Any] = []
        self.sites: list[FeedForwardSite] = []  # of feed-forward layers, in layer order

    def self_attentions(self) -> list[Any]:
        """Return the self-attention modules in layer order."""
        return self._family.self_attentions(self._transformer)

    def apply(self, number: int, tokens: TokenOrder) -> None:
        """Patch all layers.

        Args:
            number: that under which custom ops find who serves the layers.
            tokens: the order of the transformer's tokens, whose hooks come last.
        """
        facts = self._family.attention
        for layer, module in enumerate(self.self_attentions()):
            mixin = facts.processors.get(type(module.processor).__name__)
            if mixin is not None and not isinstance(module.processor, mixin):
                self._patches.set_class(module.processor, mixin)
            self._patches.set_attribute(module, TAG, make_tag(number, layer))
            if facts.tag == "mask":
                hook = tagging_hook(forward_arguments(module), over_masks=facts.tags_over_masks)
                self._patches.add_hook(module.register_forward_pre_hook(hook, with_kwargs=True))
        for layer, site in enumerate(self.sites):
            site.patch(self._patches, make_tag(number, layer))
        take_off(self._transformer, self._patches)
        if tokens.split is not None and self._family.text.cut_at_blocks:
            first, *others = getattr(self._transformer, self._family.modules.blocks[0])
            for block in (first, *others):  # of one class, so that they share a graph
                self._patches.set_class(block, CutAtEntry)
            self._patches.set_attribute(first, CUT, tokens.cut_entering)
        self.claim_attention()
        tokens.install()

    def undo(self) -> None:
        """Restore the transformer."""
        self._attention_patches.undo()
        self._layouts.undo()
        self._patches.undo()

    # Attention.

    def claim_attention(self) -> None:
        """Route dispatched self-attention to our backend, and remember the modules' own.

        If tags travel on processors, each module gets a copy of its processor, because several
        modules may share one. Processors hand their ``_parallel_config`` to the backend as it is.
        """
        modules = self.self_attentions()
        if self._family.attention.tag == "processor":
            for module in modules:
                tagged = copy.copy(module.processor)
                # It is undone, too: somebody may have kept the copy.
                tag = getattr(module, TAG)
                self._attention_patches.set_attribute(tagged, "_parallel_config", tag)
                self._attention_patches.replace_attribute(module, "processor", tagged)
        self._processors = [module.processor for module in modules]
        self._unpatched_backends = [
            getattr(processor, "_attention_backend", None) for processor in self._processors
        ]
        for processor, other in zip(self._processors, self._unpatched_backends, strict=True):
            if hasattr(processor, "_attention_backend"):
                self._attention_patches.set_attribute(
                    processor,
                    "_attention_backend",
                    attention_backend(other),
                )

    @contextlib.contextmanager
    def attention_released(self) -> Iterator[None]:
        """Give the self-attention modules their own backends back for a while."""
        self._attention_patches.undo()
        try:
            yield
        finally:
            self.claim_attention()

    def unpatched_attention(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float | None,
    ) -> torch.Tensor:
        """Return self-attention ``[B, H, N, D]`` of the backend that ours took the place of."""
        output = attention_dispatch.dispatch_attention_fn(
            *(states.transpose(1, 2) for states in (query, key, value)),
            scale=scale,
            backend=self._unpatched_backends[layer],
        )
        return output.transpose(1, 2)

    def has_pytorch_attention(self) -> bool:
        """Return whether all layers had kernels of PyTorch, and none that a user chose."""
        active = attention_dispatch._AttentionBackendRegistry._active_backend
        return all((other or active) in PYTORCH_ATTENTION for other in self._unpatched_backends)

    def lost_attention(self) -> dict[int, str]:
        """Return the layers whose attention is not routed to us any more, and why."""
        return {
            layer: self._why_lost(layer, module.processor)
            for layer, module in enumerate(self.self_attentions())
            if not is_claimed(module)
        }

    def _why_lost(self, layer: int, processor: Any) -> str:
        if processor is not self._processors[layer] or hasattr(processor, "_attention_backend"):
            return "its processor was replaced"
        return f"its processor {type(processor).__name__} does not dispatch its attention"

    # Feed-forward layers.

    def run_feed_forwards(self, execution: Execution, *, as_one: bool) -> dict[int, str]:
        """Decide before a call which feed-forward layers run as one op.

        Args:
            execution: device and dtype of the call.
            as_one: whether any is to; else all run as diffusers made them.

        Returns:
            The layers that cannot, and why.
        """
        dense: dict[int, str] = {}
        if not self.wants_contiguous_channels(execution):  # any more: of another dtype, say
            self._layouts.undo()
        for layer, site in enumerate(self.sites):
            form = self._form(site, execution) if as_one else None
            if isinstance(form, str):
                dense[layer] = form
                form = None
            elif form is not None and self._needs_layout(site, form, execution):
                make_channels_contiguous(site.second_linear(), self._layouts)
            site.run_as(form)
        return dense

    def release_feed_forwards(self) -> None:
        """Let all feed-forward layers run as diffusers made them, until the next decision."""
        for site in self.sites:
            site.run_as(None)

    def forms(self, execution: Execution) -> list[Form | str]:
        """Return the form of each layer in a call, or why it is dense."""
        return [self._form(site, execution) for site in self.sites]

    def _form(self, site: FeedForwardSite, execution: Execution) -> Form | str:
        form = site.form()
        if isinstance(form, str):
            return form
        if form.fp8 == "weights" and execution.autocast:
            return "torch.autocast casts what its weights in FP8 are multiplied by, and not them"
        if self._needs_layout(site, form, execution) and site.keeps_its_layout():
            return "its weights are offloaded in groups, so they cannot be laid out for the kernels"
        return form

    def _needs_layout(self, site: FeedForwardSite, form: Form, execution: Execution) -> bool:
        """Return whether the kernels want the second weight of a layer in another layout."""
        wanted = form.fp8 is None and self.wants_contiguous_channels(execution)
        return wanted and not has_contiguous_channels(site.second_linear())

    def wants_contiguous_channels(self, execution: Execution) -> bool:
        """Return whether the GPU kernels run, which want second weights of another layout."""
        on_gpu = execution.device.type == "cuda"
        in_half = execution.dtype in (torch.float16, torch.bfloat16)
        return on_gpu and in_half and self._config.backend != "reference"
