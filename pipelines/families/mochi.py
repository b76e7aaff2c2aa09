"""Mochi 1 (``MochiTransformer3DModel``)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from chipsparse.pipelines.call_reader import Arguments
from chipsparse.pipelines.family import Family
from chipsparse.pipelines.family_facts import (
    AttentionFacts,
    Config,
    ModuleNames,
    SameBlocks,
    Sharing,
    SparseParts,
    TextPlace,
    TimestepFacts,
    channels,
)
from chipsparse.pipelines.ops import LayerCall
from chipsparse.pipelines.padded_text import leading_tokens
from chipsparse.pipelines.processors import JointProcessor
from chipsparse.pipelines.separate_lengths import SeparateLengths
from chipsparse.pipelines.token_order import TokenOrder
from chipsparse.sparse.layers.state import OpenCall

GAPS = "the prompt's mask has gaps"


class MochiProcessor(JointProcessor):
    """Joint attention of the video and, after it, the text; its padding is left out."""

    def rotated(self, states: torch.Tensor, rotary: Any) -> torch.Tensor:
        """Turns pairs of neighbouring channels of ``[B, N, H, D]`` by angles ``[N, H, D / 2]``."""
        if rotary is None:
            return states
        cosines, sines = rotary
        even, odd = states.float().unflatten(-1, (-1, 2)).unbind(-1)
        turned = torch.stack([even * cosines - odd * sines, even * sines + odd * cosines], dim=-1)
        return turned.flatten(-2).to(states.dtype)


class MochiReader(SeparateLengths):
    """Reads prompt masks."""

    padded_length = 0  # of the open call's prompts

    def text_tokens(self, arguments: Arguments) -> int:
        """Return the valid tokens of the longest prompt, or all where masks have gaps."""
        return self.padded_length if self.lengths is None else max(self.lengths)

    def dense_because(self, arguments: Arguments) -> str | None:
        """Return the reason of masks with gaps, for which only the stock processor is made."""
        return GAPS if self.lengths is None else None

    def prompt_lengths(self, arguments: Arguments) -> list[int] | None:
        """Return the valid tokens of each prompt; None where a mask has gaps."""
        mask = arguments["encoder_attention_mask"]
        self.padded_length = mask.shape[1]
        lengths = leading_tokens(mask)
        return None if lengths is None else list(lengths)


class MochiOrder(TokenOrder):
    """Orders the video over all frames, and leaves padding out of attention."""

    reader: MochiReader

    def around(self, attend: LayerCall) -> LayerCall:
        """Return the self-attention of what is no padding; for padding, zeros."""
        return partial(self._without_padding, super().around(attend))

    def _without_padding(
        self,
        attend: LayerCall,
        state: OpenCall | None,
        *states: torch.Tensor,
        **options: Any,
    ) -> torch.Tensor:
        lengths = self.reader.lengths
        assert lengths is not None
        samples, _, tokens, _ = states[0].shape
        has_text = self.split is None or self.split.has_text
        padded = self.reader.padded_length if has_text else 0
        video = tokens - padded
        together = len(set(lengths)) == 1
        pieces = [(0, samples)] if together else [(row, row + 1) for row in range(samples)]
        outputs = []
        for (first, end), length in zip(pieces, lengths, strict=False):
            text = min(length, padded)
            valid = (part[first:end, :, : video + text] for part in states)
            output = attend(state, *valid, **options).transpose(1, 2)
            outputs.append(F.pad(output, (0, 0, 0, 0, 0, padded - text)))
        return torch.cat(outputs).transpose(1, 2)

    def order_embedded(self, _module: Any, _args: Any, output: torch.Tensor) -> torch.Tensor:
        """Order ``[B * frames, rows * columns, C]`` over all frames of a sample."""
        if not self.moves_tokens:
            return output
        state = self.session.state
        assert state is not None
        samples = output.reshape(-1, state.plan.layout.grid_tokens, output.shape[-1])
        return self.ordered(samples, 1)  # the model joins the frames of each sample


def neurons(config: Config) -> int:
    """The neurons of a gated feed-forward layer."""
    return 4 * channels(config) * 2 // 3


# Joint attention and video feed-forward layers of all blocks, the text after the video. No token
# sees the padding of a prompt. The text's columns are always kept, and its feed-forward layers stay
# dense.
MOCHI = Family(
    transformer_class="MochiTransformer3DModel",
    title="Mochi 1: text to video; guidance runs as branches of their own",
    sparse=SparseParts(
        attention="joint attention",
        mlp="feed-forward of the video tokens (gated)",
    ),
    modules=ModuleNames(
        attention="attn1",
        embedding="patch_embed",
        rotary="rope",
        last="norm_out",
    ),
    kinds=SameBlocks(mlp_sees_text=False, mlp_linears=3, neurons=neurons),
    attention=AttentionFacts(
        tags_over_masks=True,  # the prompt's, which the reader has read
        processors={"MochiAttnProcessor2_0": MochiProcessor},
    ),
    text=TextPlace(cut_at_blocks=True),
    timestep=TimestepFacts(rises=True),
    sharing=Sharing(tokens=True),
    reader=MochiReader,
    tokens=MochiOrder,
)
