"""Models whose pipelines pad the prompt and mask its padding in self-attention.

A mask keeps attention from the fastest kernels, and sparse attention takes none. So where attention
is ours, the text is cut to its valid tokens before the model sees it: no padded key is left, and
the tag takes the place of a mask that would let everything through.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

import torch

from chipsparse.pipelines.call_reader import Arguments, CallReader, remembered
from chipsparse.pipelines.ops import LayerCall
from chipsparse.pipelines.token_grids import patch_of, reorder_patches
from chipsparse.pipelines.token_order import TokenOrder


def leading_tokens(mask: torch.Tensor) -> tuple[int, ...] | None:
    """Return the tokens that a mask ``[B, N]`` keeps of each sample; waits for the device.

    The mask is not 0 where a token is valid. None if a sample has valid tokens after padding.
    """
    valid = mask.bool().cpu()
    lengths = valid.sum(dim=1)
    places = torch.arange(valid.shape[1], device="cpu")
    if not torch.equal(valid, places < lengths[:, None]):
        return None
    return tuple(lengths.tolist())


class PaddedTextReader(CallReader):
    """Reads the prompt masks of video models whose text comes after the video tokens.

    Attention is ours only in calls that need no mask. If the prompts of a batch differ in length,
    calls need it, and attention runs as the model's own; the text is still cut to the longest of
    them.
    """

    # Arguments with text, and that with the mask of each; the first text has a token at least.
    text_masks: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"encoder_hidden_states": "encoder_attention_mask"},
    )

    _leading_tokens = remembered(leading_tokens)

    def dense_because(self, arguments: Arguments) -> str | None:
        """Return why the prompts of a call need a mask, or None."""
        for lengths in self._text_lengths(arguments).values():
            if lengths is None:
                return "a prompt mask keeps others than the first tokens of a prompt"
            if min(lengths) != max(lengths):
                return (
                    f"the prompts of the batch have {min(lengths)} to {max(lengths)} tokens, so "
                    "the shorter ones need a mask"
                )
        return None

    def masks_text(self, arguments: Arguments) -> bool:
        """Return whether the text is cut, so that ours needs no mask."""
        return self.dense_because(arguments) is None

    def kept_text(self, arguments: Arguments) -> dict[str, int]:
        """Return the tokens that a caching call keeps of each text, by argument.

        They sum up to the layout's. Reads each mask once, which waits for the device.
        """
        return {
            name: arguments[name].shape[1] if lengths is None else max(lengths)
            for name, lengths in self._text_lengths(arguments).items()
        }

    def text_tokens(self, arguments: Arguments) -> int:
        """Return the number of text tokens that are kept."""
        return sum(self.kept_text(arguments).values())

    def _text_lengths(self, arguments: Arguments) -> dict[str, tuple[int, ...] | None]:
        """The valid tokens of each sample for every text, None where they are not its first."""
        lengths = {
            name: self._leading_tokens(arguments[mask]) for name, mask in self.text_masks.items()
        }
        main = next(iter(lengths))
        if 0 in (lengths[main] or ()):
            lengths[main] = None
        return lengths


class PaddedTextOrder(TokenOrder):
    """Cuts the text, and orders the video's patches before the model sees them."""

    reader: PaddedTextReader

    def around(self, attend: LayerCall) -> LayerCall:
        """Refuse attention of a layer where the text was not cut and needs its mask."""
        if not self.reader.is_ours:
            raise ValueError(
                f"layers of this {type(self.model).__name__} are called outside of its own "
                "call, where they would attend to the padding of the prompt; call the transformer "
                "itself, or disable chipsparse first",
            )
        return super().around(attend)

    def cut_entering(
        self,
        hidden: torch.Tensor,
        text: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this process's share; the video's tokens are in order since its latents were."""
        assert self.split is not None
        return self.split.own_grid(hidden, 1), self.own_text(text, 1)

    def order_inputs(self, arguments: Arguments) -> None:
        """Cut each text with its mask, and order the patches of the latents."""
        for name, tokens in self.reader.kept_text(arguments).items():
            for argument in (name, self.reader.text_masks.get(name)):
                if argument is not None:
                    arguments[argument] = arguments[argument][:, :tokens]
        order = self.video_order()
        if order is not None:
            arguments["hidden_states"] = reorder_patches(
                arguments["hidden_states"],
                patch_of(self.model.config),
                order,
            )

    def video_order(self) -> torch.Tensor | None:
        """Return the order of the tokens that ``hidden_states`` make, int64 ``[N]``, or None."""
        order = self.session.tile_order
        return None if order is None else order[0]
