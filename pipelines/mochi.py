"""Mochi 1 (``MochiTransformer3DModel``)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.attention_processor import MochiAttnProcessor2_0

from chipsparse.layers.state import StepState
from chipsparse.layout import Grid, LayerKind, ModelLayout
from chipsparse.pipelines.adapter import is_claimed
from chipsparse.pipelines.bridge import LayerCall
from chipsparse.pipelines.feed_forward import FeedForwardModule, FeedForwardSite
from chipsparse.pipelines.patches import TAG
from chipsparse.pipelines.processors import DispatchingProcessor, heads_apart, is_tag, normed
from chipsparse.pipelines.separate_lengths import SeparateLengths
from chipsparse.pipelines.timesteps import value_passed_as

ATTENTION_ARGUMENTS = ("hidden_states", "encoder_hidden_states", "attention_mask")
GAPS = "the prompt's mask has gaps"


class MochiProcessor(DispatchingProcessor):
    """Joint attention of the video and, behind it, the text with its padding.

    The adapter knows how long each prompt is, and leaves the padding out.
    """

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        attention_mask: torch.Tensor,
        image_rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Video ``[B, N, C]`` and text ``[B, T, C']``, of which it returns the same."""
        if not is_tag(attention_mask):
            output: tuple[torch.Tensor, torch.Tensor] = self.stock(
                attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb
            )
            return output
        query = normed(heads_apart(attn.to_q(hidden_states), attn), attn.norm_q)
        key = normed(heads_apart(attn.to_k(hidden_states), attn), attn.norm_k)
        value = heads_apart(attn.to_v(hidden_states), attn)
        if image_rotary_emb is not None:
            query, key = rotated(query, *image_rotary_emb), rotated(key, *image_rotary_emb)
        text_query = normed(
            heads_apart(attn.add_q_proj(encoder_hidden_states), attn), attn.norm_added_q
        )
        text_key = normed(
            heads_apart(attn.add_k_proj(encoder_hidden_states), attn), attn.norm_added_k
        )
        text_value = heads_apart(attn.add_v_proj(encoder_hidden_states), attn)
        joined = self.dispatch(
            torch.cat([query, text_query], dim=1),
            torch.cat([key, text_key], dim=1),
            torch.cat([value, text_value], dim=1),
            attention_mask,
        )
        video, text = joined.split([hidden_states.shape[1], encoder_hidden_states.shape[1]], dim=1)
        video = attn.to_out[1](attn.to_out[0](video))
        return video, attn.to_add_out(text) if hasattr(attn, "to_add_out") else text


class MochiAdapter(SeparateLengths):
    """Joint attention and video feed-forward layers of all blocks, the text behind the video.

    No token sees the padding of a prompt. Pipelines guide with two samples in one call, and their
    prompts differ in length; but layers have one sequence length in a call. So, where anything may
    run sparse, samples with prompts of other lengths are called apart, each length as a guidance
    branch of its own.

    The text's columns are always kept, and its feed-forward layers stay dense. The video tokens are
    put in order behind the patch embedding, the rotary embeddings where they are made, and in
    raster order again before the output norm. None of these hooks is inside a transformer block.
    """

    transformer_class = "MochiTransformer3DModel"
    families = "Mochi 1: text to video; guidance runs as branches of their own"
    sparse_attention = "joint attention"
    sparse_mlp = "feed-forward of the video tokens (gated)"
    shares_tokens = True

    entry_blocks = "transformer_blocks"
    _padded_length = 0

    def self_attentions(self) -> list[Any]:
        """``attn1`` of every block."""
        return [block.attn1 for block in self._model.transformer_blocks]

    def dispatching_processor(self, module: Any) -> Any | None:
        """`MochiProcessor` in place of the stock one; other processors stay."""
        stock = module.processor
        return MochiProcessor(stock) if type(stock) is MochiAttnProcessor2_0 else None

    def feed_forwards(self) -> list[FeedForwardSite]:
        """``ff`` of every block."""
        return [FeedForwardModule(block, "ff") for block in self._model.transformer_blocks]

    @classmethod
    def planned_layout(
        cls, config: Mapping[str, Any], *, latents: Grid, text_tokens: int = 0, batch: int = 1
    ) -> ModelLayout:
        """Sizes for latents of this size and a prompt that needs no padding."""
        frames, rows, columns = latents
        patch, heads, head_dim = (
            config[name] for name in ("patch_size", "num_attention_heads", "attention_head_dim")
        )
        width = 4 * heads * head_dim * 2 // 3  # fixed in the model's code
        return ModelLayout(
            kinds=(
                LayerKind("block", config["num_layers"], width, mlp_sees_text=False, mlp_linears=3),
            ),
            heads=heads,
            head_dim=head_dim,
            batch=batch,
            grids=((frames, rows // patch, columns // patch),),
            text_tokens=text_tokens,
        )

    def layout(self, arguments: dict[str, Any]) -> ModelLayout:
        """Sizes for latents ``[B, C, F, H, W]``; of the text, what is no padding."""
        batch, _, frames, rows, columns = arguments["hidden_states"].shape
        lengths = [self._padded_length] if self.lengths is None else self.lengths
        return self.planned_layout(
            self._model.config,
            latents=(frames, rows, columns),
            text_tokens=max(lengths),
            batch=batch,
        )

    @staticmethod
    def tag_attention(
        module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Passes the tag in place of the prompt's mask, which the adapter has read."""
        if not is_claimed(module):
            return None
        arguments = {**dict(zip(ATTENTION_ARGUMENTS, args, strict=False)), **kwargs}
        return (), {**arguments, "attention_mask": getattr(module, TAG)}

    def install_tile_order(self) -> None:
        """Hooks patch embedding, rotary embedding and output norm."""
        model, add = self._model, self._patches.add_hook
        add(model.patch_embed.register_forward_hook(self._order_video))
        add(model.rope.register_forward_hook(self._order_rotary))
        add(model.norm_out.register_forward_pre_hook(self.restore_order))

    def scheduled_timestep(self, timestep: Any, schedule: Any) -> float:
        """The scheduler's value, which pipelines round to the latents' dtype.

        Mochi's timesteps rise. One that is in no schedule is told as its negative, because later
        steps have lower ones elsewhere.
        """
        value = value_passed_as(timestep, schedule)
        return -float(torch.as_tensor(timestep).max()) if value is None else value

    def why_attention_is_dense(self, arguments: dict[str, Any]) -> str | None:
        """Only the stock processor knows what to do with a mask that has gaps."""
        return GAPS if self.lengths is None else None

    def needs_mask(self, arguments: dict[str, Any]) -> bool:
        """As `why_attention_is_dense`."""
        return self.lengths is None

    def prompt_lengths(self, arguments: dict[str, Any]) -> list[int] | None:
        """What `prompt_lengths` makes of the call's mask."""
        mask = arguments["encoder_attention_mask"]
        self._padded_length = mask.shape[1]
        return prompt_lengths(mask)

    def attention(self, layer: int) -> LayerCall:
        """As `ModelAdapter.attention` of what is no padding; in the place of padding, zeros."""
        return partial(self._without_padding, super().attention(layer))

    def _without_padding(
        self,
        attend: LayerCall,
        state: StepState | None,
        *states: torch.Tensor,
        **options: Any,
    ) -> torch.Tensor:
        assert self.lengths is not None
        samples, _, tokens, _ = states[0].shape
        has_text = self.split is None or self.split.has_text
        padded = self._padded_length if has_text else 0
        video = tokens - padded
        together = len(set(self.lengths)) == 1
        pieces = [(0, samples)] if together else [(row, row + 1) for row in range(samples)]
        outputs = []
        for (first, end), length in zip(pieces, self.lengths, strict=False):
            text = min(length, padded)
            valid = (each[first:end, :, : video + text] for each in states)
            output = attend(state, *valid, **options).transpose(1, 2)
            outputs.append(F.pad(output, (0, 0, 0, 0, 0, padded - text)))
        return torch.cat(outputs).transpose(1, 2)

    # Tile order.

    def _order_video(self, _module: Any, _args: Any, output: torch.Tensor) -> torch.Tensor:
        """Orders ``[B * frames, rows * columns, C]`` over all frames of a sample."""
        if not self.moves_tokens:
            return output
        state = self.session.state
        assert state is not None
        samples = output.reshape(-1, state.plan.layout.grid_tokens, output.shape[-1])
        return self.ordered(samples, 1)  # the model joins the frames of each sample

    def _order_rotary(
        self, _module: Any, _args: Any, output: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        return tuple(self.ordered(part, 0) for part in output)


def rotated(states: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Turns pairs of neighbouring channels of ``[B, N, H, D]`` by angles ``[N, H, D / 2]``."""
    even, odd = states.float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([even * cosines - odd * sines, even * sines + odd * cosines], dim=-1)
    return turned.flatten(-2).to(states.dtype)


def prompt_lengths(mask: torch.Tensor) -> list[int] | None:
    """How many tokens of each prompt are no padding; waits for the device.

    Args:
        mask: ``[B, T]`` in any dtype, zero where there is padding.

    Returns:
        None where padding stands before other tokens.
    """
    valid = mask.cpu() != 0
    lengths = valid.sum(dim=1)
    behind = torch.arange(mask.shape[1]) >= lengths[:, None]
    return None if (valid & behind).any() else lengths.tolist()
