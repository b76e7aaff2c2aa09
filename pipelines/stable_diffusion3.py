"""Stable Diffusion 3 and 3.5 (``SD3Transformer2DModel``), medium and large."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Any

import torch
from diffusers.models.attention_processor import JointAttnProcessor2_0

from chipsparse.layout import Grid, LayerKind, ModelLayout
from chipsparse.pipelines.adapter import ModelAdapter, tagged
from chipsparse.pipelines.feed_forward import FeedForwardModule, FeedForwardSite
from chipsparse.pipelines.processors import DispatchingProcessor, heads_apart, is_tag, normed

ATTENTION_ARGUMENTS = ("hidden_states", "encoder_hidden_states", "attention_mask")
CONTROL_SAMPLES = "block_controlnet_hidden_states"
MLP_RATIO = 4  # fixed in the model's code
PROJECTIONS = 4  # q, k, v and out of one attention


class JointProcessor(DispatchingProcessor):
    """Joint attention of the image and, behind it, the text."""

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Image ``[B, N, C]`` and text ``[B, T, C]``, of which it returns the same."""
        if encoder_hidden_states is None or not is_tag(attention_mask):
            result: tuple[torch.Tensor, torch.Tensor] = self.stock(
                attn, hidden_states, encoder_hidden_states, attention_mask, *args, **kwargs
            )
            return result

        def joined(image: Any, image_norm: Any, text: Any, text_norm: Any) -> torch.Tensor:
            return torch.cat(
                [
                    normed(heads_apart(image(hidden_states), attn), image_norm),
                    normed(heads_apart(text(encoder_hidden_states), attn), text_norm),
                ],
                dim=1,
            )

        query = joined(attn.to_q, attn.norm_q, attn.add_q_proj, attn.norm_added_q)
        key = joined(attn.to_k, attn.norm_k, attn.add_k_proj, attn.norm_added_k)
        value = joined(attn.to_v, None, attn.add_v_proj, None)
        assert attention_mask is not None
        output = self.dispatch(query, key, value, attention_mask).to(query.dtype)
        image, text = output.split([hidden_states.shape[1], encoder_hidden_states.shape[1]], dim=1)
        if not attn.context_pre_only:
            text = attn.to_add_out(text)
        return attn.to_out[1](attn.to_out[0](image)), text


class StableDiffusion3Adapter(ModelAdapter):
    """Joint attention and image feed-forward layers of all blocks, the text behind the image.

    The text's columns are always kept, and its feed-forward layers stay dense. So does the second
    attention of the dual layers of 3.5 medium (``attn2``), which sees the image alone. The image
    tokens are put in order behind the patch embedding, which adds their positions, with the
    residuals of a ControlNet, and in raster order again before the output norm. None of these hooks
    is inside a transformer block.
    """

    transformer_class = "SD3Transformer2DModel"
    families = "Stable Diffusion 3 and 3.5: text and image to image, inpainting, ControlNet"
    sparse_attention = "joint attention; the second one of 3.5 medium (attn2) is left dense"
    sparse_mlp = "feed-forward of the image tokens"
    shares_tokens = True
    guides_in_batch = True
    default_latents = 128
    entry_blocks = "transformer_blocks"

    def self_attentions(self) -> list[Any]:
        """``attn`` of every block."""
        return [block.attn for block in self._model.transformer_blocks]

    def dispatching_processor(self, module: Any) -> Any | None:
        """`JointProcessor` in place of the stock one; other processors stay."""
        stock = module.processor
        return JointProcessor(stock) if type(stock) is JointAttnProcessor2_0 else None

    def feed_forwards(self) -> list[FeedForwardSite]:
        """``ff`` of every block."""
        return [FeedForwardModule(block, "ff") for block in self._model.transformer_blocks]

    @classmethod
    def planned_layout(
        cls, config: Mapping[str, Any], *, latents: Grid, text_tokens: int = 0, batch: int = 1
    ) -> ModelLayout:
        """Sizes for one image; dual layers are a kind of their own."""
        _, rows, columns = latents
        dual = [layer in config["dual_attention_layers"] for layer in range(config["num_layers"])]
        width = MLP_RATIO * config["num_attention_heads"] * config["attention_head_dim"]
        return ModelLayout(
            kinds=tuple(
                LayerKind(
                    "dual" if is_dual else "joint",
                    len(list(layers)),
                    width,
                    mlp_sees_text=False,
                    projections=2 * PROJECTIONS if is_dual else PROJECTIONS,
                )
                for is_dual, layers in groupby(dual)
            ),
            heads=config["num_attention_heads"],
            head_dim=config["attention_head_dim"],
            batch=batch,
            grids=((1, rows // config["patch_size"], columns // config["patch_size"]),),
            text_tokens=text_tokens,
        )

    def layout(self, arguments: dict[str, Any]) -> ModelLayout:
        """Sizes for latents ``[B, C, H, W]``."""
        batch, _, rows, columns = arguments["hidden_states"].shape
        return self.planned_layout(
            self._model.config,
            latents=(1, rows, columns),
            text_tokens=arguments["encoder_hidden_states"].shape[1],
            batch=batch,
        )

    @staticmethod
    def tag_attention(
        module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Passes the tag as the attention mask, which the stock processor does not read."""
        return tagged(module, args, {**kwargs, "attention_mask": None}, ATTENTION_ARGUMENTS)

    def install_tile_order(self) -> None:
        """Hooks the patch embedding, the ControlNet's residuals and the output norm."""
        model, add = self._model, self._patches.add_hook
        add(model.pos_embed.register_forward_hook(self._order_image))
        add(model.register_forward_pre_hook(self._order_control, with_kwargs=True))
        add(model.norm_out.register_forward_pre_hook(self.restore_order))

    def remarks(self, arguments: dict[str, Any]) -> list[str]:
        """Which attention of the dual layers is never sparse."""
        blocks = self._model.transformer_blocks
        dual = sum(block.attn2 is not None for block in blocks)
        if dual == 0 or not (self.session.caching and self.session.config.attention.enabled):
            return []
        return [
            f"the second attention (attn2) of {dual} of {len(blocks)} layers runs dense: "
            "only the joint one is sparse"
        ]

    @classmethod
    def why_not_split(cls, config: Mapping[str, Any]) -> str | None:
        """The second attention of dual layers would see this process's image tokens alone."""
        if not config["dual_attention_layers"]:
            return super().why_not_split(config)
        return "its second attention (attn2, in dual layers) is not exchanged between them"

    def _order_image(self, _module: Any, _args: Any, output: torch.Tensor) -> torch.Tensor:
        return self.ordered(output, 1)

    def _order_control(
        self, _module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        arguments = {**dict(zip(self._argument_names, args, strict=False)), **kwargs}
        samples = arguments.get(CONTROL_SAMPLES)
        if samples is None or not self.moves_tokens:
            return None
        arguments[CONTROL_SAMPLES] = [self.ordered(sample, 1) for sample in samples]
        return (), arguments
