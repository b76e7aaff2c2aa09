"""Qwen-Image 2.1 (``QwenImage21Transformer2DModel``): text to image, editing, turbo."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from chipsparse.layers.state import StepState
from chipsparse.layout import Grid
from chipsparse.pipelines.adapter import ModelAdapter
from chipsparse.pipelines.bridge import LayerCall
from chipsparse.pipelines.feed_forward_forms import MLPParts
from chipsparse.pipelines.tensor_facts import remembered
from chipsparse.step import StepContext

MODE, MASK = "kv_cache_mode", "encoder_hidden_states_mask"
NO_CACHE = (
    "nothing runs sparse: Qwen-Image 2.1 computes its prompt at every step; leave use_kv_cache on"
)


class QwenImage21Adapter(ModelAdapter):
    """Attention and feed-forward layers of the image's tokens, behind keys of the prompt.

    The pipeline's first step fills a cache with keys and values of the prompt and of reference
    images, which no later step changes. It runs as without chipsparse, and the second is the first
    that records. From then on layers see the image's tokens alone, and its queries meet the keys of
    the cache besides their own: those columns stand first, as text, and are always kept. The ops
    want as many queries as keys, so zeros stand for the queries of the prompt.
    """

    transformer_class = "QwenImage21Transformer2DModel"
    families = "Qwen-Image 2.1, turbo too: text to image, editing"
    sparse_attention = "the image's, to the prompt and itself; the first step is the model's own"
    sparse_mlp = "feed-forward (gated) of the image tokens"
    why_whole = "its first step, which keeps keys of the prompt, runs as without chipsparse"
    guidance_argument = "true_cfg_scale"
    timestep_scale = 1000
    mlp_name = "img_mlp"
    mlp_parts = MLPParts("proj", "out", "gate_layer", "activation_fn")
    mlp_sees_text = False
    mlp_linears = 3
    text_place = "first"  # keys of the prompt and of reference images
    rotary_name = "pos_embed"
    last_name = "norm_out"

    _is_all_valid = remembered(lambda mask: bool(mask.all()))

    @classmethod
    def grids(cls, config: Mapping[str, Any], latents: Grid) -> tuple[Grid, ...]:
        """That of one image; latents are not cut into patches."""
        return (latents,)

    def called_grids(self, arguments: dict[str, Any]) -> tuple[Grid, ...]:
        return (tuple(arguments["img_shapes"][0][-1]),)

    def text_tokens(self, arguments: dict[str, Any]) -> int:
        return arguments["kv_cache"].get_layer(0).get()[0].shape[1]

    def why_attention_is_dense(self, arguments: dict[str, Any]) -> str | None:
        """A mask that leaves something out; modular pipelines always pass one."""
        mask = arguments.get(MASK)
        if mask is None or self._is_all_valid(mask):
            return None
        return "the prompts of the batch differ in length, so the shorter ones need a mask"

    # The first step.

    def knows(self, context: StepContext, arguments: dict[str, Any]) -> bool:
        """Return whether a call reads the keys of the prompt that an earlier one has kept."""
        return bool(arguments.get(MODE) == "cached")

    def observe(
        self, context: StepContext, arguments: dict[str, Any], forward: Callable[[], Any]
    ) -> Any:
        if context.step == 0:
            self.session.reset()
        with self.outside_of_session(context):
            if arguments.get(MODE) is None:
                self.session.report.run_dense(NO_CACHE)
            for site in self.feed_forward_sites:
                site.run_as(None)
            return forward()

    def _not_captured_reason(self) -> str | None:
        return "the host reads where in the sequence images are"

    # As many queries as keys.

    def attention(self, layer: int) -> LayerCall:
        """The layer's attention, with queries of zeros for the keys that are kept."""
        return partial(self._behind_kept_keys, super().attention(layer))

    def _behind_kept_keys(
        self,
        attend: LayerCall,
        state: StepState | None,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        **options: Any,
    ) -> torch.Tensor:
        kept = key.shape[2] - query.shape[2]
        output = attend(state, F.pad(query, (0, 0, kept, 0)), key, value, **options)
        return output[:, :, kept:]

    # Tile order.

    def order_inputs(self, arguments: dict[str, Any]) -> None:
        if not self.needs_mask(arguments):
            arguments[MASK] = None
        arguments["hidden_states"] = self.ordered_beside_text(arguments["hidden_states"], 1)

    def ordered_rotary(self, _module: Any, _args: Any, output: torch.Tensor) -> torch.Tensor:
        return self.ordered_beside_text(output, 0)
