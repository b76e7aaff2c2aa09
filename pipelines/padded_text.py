"""Models whose pipelines pad the prompt and mask its padding in self-attention.

A mask keeps attention from the fastest kernels, and sparse attention takes none. So where attention
is ours, the text is cut to its valid tokens before the model sees it: no padded key is left, and
the tag takes the place of a mask that would let everything through.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import torch

from chipsparse.pipelines.adapter import ModelAdapter
from chipsparse.pipelines.bridge import LayerCall
from chipsparse.pipelines.tensor_facts import remembered
from chipsparse.pipelines.token_grids import patch_of, reorder_patches


def leading_tokens(mask: torch.Tensor) -> tuple[int, ...] | None:
    """The tokens that a mask ``[B, N]`` keeps of each sample; waits for the device.

    The mask is not 0 where a token is valid. None where a sample has valid tokens behind padding.
    """
    valid = mask.bool().cpu()
    lengths = valid.sum(dim=1)
    places = torch.arange(valid.shape[1], device="cpu")
    if not torch.equal(valid, places < lengths[:, None]):
        return None
    return tuple(lengths.tolist())


class PaddedTextAdapter(ModelAdapter):
    """The part that such video models share; their text stands behind the video tokens.

    Attention is this adapter's only in calls that need no mask. Where the prompts of a batch differ
    in length they do need it, and attention runs as the model's own; the text is cut to the longest
    of them all the same.
    """

    cuts_at_blocks = True
    tags_over_masks = True
    # Arguments with text, and that with the mask of each; the first text has a token at least.
    text_masks: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"encoder_hidden_states": "encoder_attention_mask"},
    )
    rotary_name = "rope"
    last_name = "norm_out"

    _leading_tokens = remembered(leading_tokens)

    def why_attention_is_dense(self, arguments: dict[str, Any]) -> str | None:
        for lengths in self._text_lengths(arguments).values():
            if lengths is None:
                return "a prompt mask keeps others than the first tokens of a prompt"
            if min(lengths) != max(lengths):
                return (
                    f"the prompts of the batch have {min(lengths)} to {max(lengths)} tokens, so "
                    "the shorter ones need a mask"
                )
        return None

    def masks_text(self, arguments: dict[str, Any]) -> bool:
        return self.why_attention_is_dense(arguments) is None

    def kept_text(self, arguments: dict[str, Any]) -> dict[str, int]:
        """The tokens that a caching call keeps of each text, by argument; sums up to the layout's.

        Reads each mask once, which waits for the device.
        """
        return {
            name: arguments[name].shape[1] if lengths is None else max(lengths)
            for name, lengths in self._text_lengths(arguments).items()
        }

    def text_tokens(self, arguments: dict[str, Any]) -> int:
        return sum(self.kept_text(arguments).values())

    def attention(self, layer: int) -> LayerCall:
        """The self-attention of a layer; refused where the text was not cut and needs its mask."""
        if not (self.session.attends or self.split is not None):
            raise ValueError(
                f"layers of this {type(self.transformer).__name__} are called outside of its own "
                "call, where they would attend to the padding of the prompt; call the transformer "
                "itself, or disable chipsparse first",
            )
        return super().attention(layer)

    def cut_entering(
        self,
        hidden: torch.Tensor,
        text: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """This process's share of the tokens; the video's are in order since its latents were."""
        assert self.split is not None
        return self.split.own_grid(hidden, 1), self.own_text(text, 1)

    def _text_lengths(self, arguments: dict[str, Any]) -> dict[str, tuple[int, ...] | None]:
        """The valid tokens of each sample for every text, None where they are not its first."""
        lengths = {
            name: self._leading_tokens(arguments[mask]) for name, mask in self.text_masks.items()
        }
        main = next(iter(lengths))
        if 0 in (lengths[main] or ()):
            lengths[main] = None
        return lengths

    def order_inputs(self, arguments: dict[str, Any]) -> None:
        for name, tokens in self.kept_text(arguments).items():
            for argument in (name, self.text_masks.get(name)):
                if argument is not None:
                    arguments[argument] = arguments[argument][:, :tokens]
        order = self.video_order()
        if order is not None:
            arguments["hidden_states"] = reorder_patches(
                arguments["hidden_states"],
                patch_of(self._model.config),
                order,
            )

    def video_order(self) -> torch.Tensor | None:
        """Order of the tokens that ``hidden_states`` make, int64 ``[N]``; None: unchanged."""
        order = self.session.tile_order
        return None if order is None else order[0]
