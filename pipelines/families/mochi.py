"""Mochi 1 (``MochiTransformer3DModel``)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F

from chipsparse.pipelines.bridge import LayerCall
from chipsparse.pipelines.padded_text import leading_tokens
from chipsparse.pipelines.processors import JointProcessor
from chipsparse.pipelines.separate_lengths import SeparateLengths
from chipsparse.sparse.layers.state import StepState

GAPS = "the prompt's mask has gaps"


class MochiProcessor(JointProcessor):
    """Joint attention of the video and, behind it, the text; the adapter leaves its padding out."""

    def rotated(self, states: torch.Tensor, rotary: Any) -> torch.Tensor:
        """Turns pairs of neighbouring channels of ``[B, N, H, D]`` by angles ``[N, H, D / 2]``."""
        if rotary is None:
            return states
        cosines, sines = rotary
        even, odd = states.float().unflatten(-1, (-1, 2)).unbind(-1)
        turned = torch.stack([even * cosines - odd * sines, even * sines + odd * cosines], dim=-1)
        return turned.flatten(-2).to(states.dtype)


class MochiAdapter(SeparateLengths):
    """Joint attention and video feed-forward layers of all blocks, the text behind the video.

    No token sees the padding of a prompt. The text's columns are always kept, and its feed-forward
    layers stay dense.
    """

    transformer_class = "MochiTransformer3DModel"
    families = "Mochi 1: text to video; guidance runs as branches of their own"
    sparse_attention = "joint attention"
    sparse_mlp = "feed-forward of the video tokens (gated)"
    shares_tokens = True
    cuts_at_blocks = True
    timestep_rises = True
    attention_name = "attn1"
    mlp_sees_text = False
    mlp_linears = 3
    tags_over_masks = True  # the prompt's, which the adapter has read
    own_processors = MappingProxyType({"MochiAttnProcessor2_0": MochiProcessor})

    embedding_name = "patch_embed"
    rotary_name = "rope"
    last_name = "norm_out"

    _padded_length = 0

    @classmethod
    def neurons(cls, config: Mapping[str, Any]) -> int:
        return 4 * cls.channels(config) * 2 // 3

    def text_tokens(self, arguments: dict[str, Any]) -> int:
        return self._padded_length if self.lengths is None else max(self.lengths)

    def why_attention_is_dense(self, arguments: dict[str, Any]) -> str | None:
        """Only the stock processor knows what to do with a mask that has gaps."""
        return GAPS if self.lengths is None else None

    def prompt_lengths(self, arguments: dict[str, Any]) -> list[int] | None:
        mask = arguments["encoder_attention_mask"]
        self._padded_length = mask.shape[1]
        lengths = leading_tokens(mask)
        return None if lengths is None else list(lengths)

    def attention(self, layer: int) -> LayerCall:
        """The self-attention of what is no padding; in the place of padding, zeros."""
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
            valid = (part[first:end, :, : video + text] for part in states)
            output = attend(state, *valid, **options).transpose(1, 2)
            outputs.append(F.pad(output, (0, 0, 0, 0, 0, padded - text)))
        return torch.cat(outputs).transpose(1, 2)

    def order_embedded(self, _module: Any, _args: Any, output: torch.Tensor) -> torch.Tensor:
        """Orders ``[B * frames, rows * columns, C]`` over all frames of a sample."""
        if not self.moves_tokens:
            return output
        state = self.session.state
        assert state is not None
        samples = output.reshape(-1, state.plan.layout.grid_tokens, output.shape[-1])
        return self.ordered(samples, 1)  # the model joins the frames of each sample
