"""MiniMax-H3 (``MiniMaxH3Transformer3DModel``): video with sound, from one packed sequence."""

from __future__ import annotations

import torch

from chipsparse.layout import Grid
from chipsparse.pipelines.call_reader import Arguments, CallReader, remembered
from chipsparse.pipelines.family import Family
from chipsparse.pipelines.family_facts import (
    GuidanceFacts,
    ModuleNames,
    SameBlocks,
    Sharing,
    SparseParts,
    TextPlace,
    TimestepFacts,
)
from chipsparse.pipelines.packed_rows import read_video, video_last
from chipsparse.pipelines.token_order import TokenOrder

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


class MiniMaxH3Reader(CallReader):
    """Reads packed sequences of text, sound, conditions and the video that is generated."""

    _videos = remembered(read_video)

    def grids(self, arguments: Arguments) -> tuple[Grid, ...]:
        """Return the grid of the generated video."""
        grid, _ = self.video(arguments)
        return (grid,)

    def text_tokens(self, arguments: Arguments) -> int:
        """Return the number of rows that are not of the generated video."""
        _, rows = self.video(arguments)
        return len(arguments["position_ids"]) - len(rows)

    def notes(self, arguments: Arguments) -> list[str]:
        """Return a note if conditions take up all that sparse steps keep.

        Each picture has many rows.
        """
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

    def own_timestep(self, arguments: Arguments) -> torch.Tensor:
        """Return the timestep of the generated video."""
        _, rows = self.video(arguments)
        return arguments["timestep"][arguments["timestep_indices"][rows[-1]]]

    def video(self, arguments: Arguments) -> tuple[Grid, torch.Tensor]:
        """Return the grid and the rows of a call's video; reads each sequence once."""
        return self._videos(arguments["position_ids"], arguments["video_indices"])


class MiniMaxH3Order(TokenOrder):
    """Puts the video's rows last, in tiles.

    The model finds rows by indices, so to put them in order is to change those. Its outputs follow
    its indices and stay in the pipeline's order.
    """

    reader: MiniMaxH3Reader

    # Captured steps read them there.
    _orders = remembered(lambda positions, *rows: video_last(positions.T, *rows))

    def order_inputs(self, arguments: Arguments) -> None:
        """Change the indices, and order what each row has."""
        _, rows = self.reader.video(arguments)
        tiles = (self.session.tile_order or ())[:1]
        order, place = self._orders(arguments["position_ids"], rows, *tiles)
        for name in PER_ROW:
            arguments[name] = arguments[name].index_select(0, order)
        for name in INDICES:
            arguments[name] = place.index_select(0, arguments[name])


def audio_rows(latent_frames: int) -> int:
    """Return the rows of the sound of a video with this number of latent frames."""
    chunks = -(-max(0, latent_frames - LATENT_FIRST) // LATENT_CHUNK)
    return AUDIO_CHANNELS * round((CHUNK * chunks + FIRST) * AUDIO_LATENTS)


def planned_text(text_tokens: int, latents: Grid) -> int:
    """The rows of the prompt and of the video's sound, without conditions."""
    return text_tokens + audio_rows(latents[0])


# Self-attention and feed-forward layers of all blocks, for the rows of the generated video. Text,
# audio and conditions stand in the same sequence. Their columns are always kept, and their own rows
# are computed in full, in attention and feed-forward layers: there are few of them, and sound
# suffers first. The token refiner is not patched. A forecast draws its line for both outputs over
# the timesteps of the video.
MINIMAX_H3 = Family(
    transformer_class="MiniMaxH3Transformer3DModel",
    title="MiniMax-H3: text, images, video and audio to video with sound",
    sparse=SparseParts(
        attention="self-attention of the video rows; text, audio and conditions are exact",
        mlp="feed-forward (gated) of the video rows",
    ),
    # The text decides about the dtype of the blocks; video and audio may have another.
    modules=ModuleNames(dtype="context_embedder"),
    kinds=SameBlocks(mlp_linears=3),
    # And whatever else is no row of the generated video.
    text=TextPlace("first", exact=True, planned=planned_text),
    guidance=GuidanceFacts(None),
    timestep=TimestepFacts(rises=True, uncalled_steps=1),  # the scheduler counts the end
    sharing=Sharing(
        why_whole="it finds rows of text, sound and video by their places among all rows",
    ),
    reader=MiniMaxH3Reader,
    tokens=MiniMaxH3Order,
)
