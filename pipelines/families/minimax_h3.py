"""MiniMax-H3 (``MiniMaxH3Transformer3DModel``): video with sound, from one packed sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from diffusers.models.modeling_utils import get_parameter_dtype

from chipsparse.layout import Grid
from chipsparse.pipelines.execution import Execution
from chipsparse.pipelines.packed_rows import read_video, video_last
from chipsparse.pipelines.streams import VideoWithSound
from chipsparse.pipelines.tensor_facts import remembered

INDICES = ("video_indices", "audio_indices", "text_indices")
PER_ROW = ("position_ids", "token_tags", "timestep_indices")
# What the pipeline's VAEs make of a video: of 17 frames more 5 latent ones more, beside 2 for the
# first 5; and of a second, which has 24 frames, 40 latents of each of two channels.
CHUNK = 17
LATENT_CHUNK = 5
FIRST = 5
LATENT_FIRST = 2
AUDIO_LATENTS = 40 / 24
AUDIO_CHANNELS = 2


class MiniMaxH3Adapter(VideoWithSound):
    """Self-attention and feed-forward layers of all blocks, for the rows of the generated video.

    Text, audio and conditions stand in the same sequence. Their columns are always kept, and their
    own rows are computed in full, in attention and feed-forward layers: there are few of them, and
    sound suffers first. Of the token refiner nothing is patched.

    The model finds rows by indices, so to put them in order is to change those: the others first,
    the video's rows behind them in 3D tiles. Its outputs follow its indices and stay in the
    pipeline's order. A skipped call gives both outputs; a forecast draws its line for both over the
    timesteps of the video.
    """

    transformer_class = "MiniMaxH3Transformer3DModel"
    families = "MiniMax-H3: text, images, video and audio to video with sound"
    sparse_attention = "self-attention of the video rows; text, audio and conditions are exact"
    sparse_mlp = "feed-forward (gated) of the video rows"
    why_whole = "it finds rows of text, sound and video by their places among all rows"
    guidance_argument = None
    timestep_rises = True
    uncalled_steps = 1  # the scheduler counts the end
    text_place = "first"  # and whatever else is no row of the generated video
    exact_text = True
    mlp_linears = 3
    output_class = "transformer_minimax_h3", "MiniMaxH3TransformerOutput"

    _videos = remembered(read_video)
    # Captured steps read them there.
    _orders = remembered(lambda positions, *rows: video_last(positions.T, *rows))

    @classmethod
    def planned_text(cls, text_tokens: int, latents: Grid) -> int:
        """With the sound of the video, and no conditions."""
        return text_tokens + audio_rows(latents[0])

    def called_grids(self, arguments: dict[str, Any]) -> tuple[Grid, ...]:
        grid, _ = self._video(arguments)
        return (grid,)

    def text_tokens(self, arguments: dict[str, Any]) -> int:
        _, rows = self._video(arguments)
        return len(arguments["position_ids"]) - len(rows)

    def notes(self, arguments: dict[str, Any]) -> list[str]:
        """A note if conditions take up all that sparse steps keep: each picture has many rows."""
        plan = self.session.plan
        if plan is None or plan.is_dense():
            return []
        others = plan.layout.text_tokens
        tokens = plan.layout.tokens
        layers = [n for n in range(plan.layout.layers) if plan.is_sparse(n, "attention")]
        kept = [plan.attention_keep_count(layer) for layer in layers]
        if not kept or max(kept) > others:
            return []
        return [
            f"{others:,} of the {tokens:,} tokens are text, sound and conditions, whose columns "
            f"are always kept, and attention.density keeps {max(kept):,}: none of the video's are "
            "kept by their sums; raise it",
        ]

    def own_timestep(self, arguments: dict[str, Any]) -> torch.Tensor:
        _, rows = self._video(arguments)
        return arguments["timestep"][arguments["timestep_indices"][rows[-1]]]

    def stream_shapes(self, arguments: dict[str, Any]) -> list[Sequence[int]]:
        return [arguments[name].shape[1:] for name in ("hidden_states", "audio_hidden_states")]

    def _execution(self, hidden: torch.Tensor) -> Execution:
        """The text decides about the dtype of the blocks; video and audio may have another."""
        execution = super()._execution(hidden)
        if execution.autocast:
            return execution
        return replace(execution, dtype=get_parameter_dtype(self._model.context_embedder))

    def _video(self, arguments: dict[str, Any]) -> tuple[Grid, torch.Tensor]:
        """The grid and the rows of a call's video; reads each sequence once."""
        return self._videos(arguments["position_ids"], arguments["video_indices"])

    def order_inputs(self, arguments: dict[str, Any]) -> None:
        _, rows = self._video(arguments)
        tiles = (self.session.tile_order or ())[:1]
        order, place = self._orders(arguments["position_ids"], rows, *tiles)
        for name in PER_ROW:
            arguments[name] = arguments[name].index_select(0, order)
        for name in INDICES:
            arguments[name] = place.index_select(0, arguments[name])


def audio_rows(latent_frames: int) -> int:
    """Rows of the sound of a video that has so many latent frames."""
    chunks = -(-max(0, latent_frames - LATENT_FIRST) // LATENT_CHUNK)
    return AUDIO_CHANNELS * round((CHUNK * chunks + FIRST) * AUDIO_LATENTS)
