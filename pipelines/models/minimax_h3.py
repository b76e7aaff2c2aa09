"""MiniMax-H3 (``MiniMaxH3Transformer3DModel``): video with sound, from one packed sequence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from diffusers.models.modeling_utils import get_parameter_dtype

from chipsparse.layers.tile_order import inverse_order
from chipsparse.layout import Grid, ModelLayout
from chipsparse.pipelines.adapter import ModelAdapter
from chipsparse.pipelines.execution import Execution
from chipsparse.pipelines.packed_rows import PackedRows, check_noise, read_rows
from chipsparse.pipelines.tensor_facts import TensorFacts

INDICES = ("video_indices", "audio_indices", "text_indices")
PER_ROW = ("position_ids", "token_tags", "timestep_indices")
# What the pipeline's VAEs make of a video: of 17 frames more 5 latent ones more, beside 2 for the
# first 5; and of a second, which has 24 frames, 40 latents of each of two channels.
CHUNK, LATENT_CHUNK, FIRST, LATENT_FIRST = 17, 5, 5, 2
AUDIO_LATENTS, AUDIO_CHANNELS = 40 / 24, 2


class MiniMaxH3Adapter(ModelAdapter):
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
    uncalled_steps = 1  # the scheduler counts the end
    text_place = "first"  # and whatever else is no row of the generated video
    exact_text = True
    own_hidden_size = True
    mlp_linears = 3

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._rows = TensorFacts(read_rows)
        self._checked: PackedRows | None = None
        self._places: tuple[Any, ...] = ()
        super().__init__(*args, **kwargs)

    @classmethod
    def planned_layout(
        cls, config: Mapping[str, Any], *, latents: Grid, text_tokens: int = 0, batch: int = 1
    ) -> ModelLayout:
        """The planned sizes of a video with its sound, and no conditions."""
        others = text_tokens + audio_rows(latents[0])
        return super().planned_layout(config, latents=latents, text_tokens=others, batch=batch)

    def called_grids(self, arguments: dict[str, Any]) -> tuple[Grid, ...]:
        """That of the rows that a call names."""
        return (self._rows_of(arguments).grid,)

    def text_tokens(self, arguments: dict[str, Any]) -> int:
        """All other rows."""
        return self._rows_of(arguments).others.numel()

    def install_tile_order(self) -> None:
        """Hooks the transformer's inputs."""
        self.hook_inputs(self._order_rows)

    def notes(self, arguments: dict[str, Any]) -> list[str]:
        """A note if conditions take up all that sparse steps keep: each picture has many rows."""
        plan = self.session.plan
        if plan is None or plan.is_dense():
            return []
        others, tokens = plan.layout.text_tokens, plan.layout.tokens
        layers = range(plan.layout.layers)
        kept = [
            plan.attention_keep_count(layer)
            for layer in layers
            if plan.is_sparse(layer, "attention")
        ]
        if not kept or max(kept) > others:
            return []
        return [
            f"{others:,} of the {tokens:,} tokens are text, sound and conditions, whose columns "
            f"are always kept, and attention.density keeps {max(kept):,}: none of the video's are "
            "kept by their sums; raise it"
        ]

    def own_timestep(self, arguments: dict[str, Any]) -> torch.Tensor:
        """That of the video, 0-d."""
        row = self._rows_of(arguments).video[-1]
        timestep: torch.Tensor = arguments["timestep"][arguments["timestep_indices"][row]]
        return timestep

    def scheduled_timestep(self, timestep: Any, schedule: Any) -> float:
        """The scheduler's own, which pipelines pass as it is.

        H3's timesteps rise. One that is in no schedule is given as its negative, because later
        steps have lower ones elsewhere.
        """
        value = float(timestep)
        known = schedule is not None and bool((torch.as_tensor(schedule) == value).any())
        return value if known else -value

    def held_output(self, result: Any) -> torch.Tensor:
        """Video and audio in one row of numbers."""
        return torch.cat([result[0].flatten(), result[1].flatten()])

    def wrap_output(self, output: torch.Tensor, arguments: dict[str, Any]) -> Any:
        """Both, as large as what they are for, in a tuple or as ``return_dict`` asks."""
        shapes = [arguments[name].shape for name in ("hidden_states", "audio_hidden_states")]
        parts = output.split([shape.numel() for shape in shapes])
        video, audio = (part.view(shape) for part, shape in zip(parts, shapes, strict=True))
        if not arguments.get("return_dict", True):
            return video, audio
        from diffusers.models.transformers.transformer_minimax_h3 import MiniMaxH3TransformerOutput

        return MiniMaxH3TransformerOutput(sample=video, audio_sample=audio)

    def _execution(self, hidden: torch.Tensor) -> Execution:
        """The text decides about the dtype of the blocks; video and audio may have another."""
        execution = super()._execution(hidden)
        if execution.autocast:
            return execution
        return replace(execution, dtype=get_parameter_dtype(self._model.context_embedder))

    def _rows_of(self, arguments: dict[str, Any]) -> PackedRows:
        """The rows of a call; reads each sequence once, which waits for the device.

        Raises:
            ValueError: if its parts contradict each other, or are in an order that is not known.
        """
        names = ("position_ids", "token_tags", *INDICES)
        rows = self._rows(*(arguments[name] for name in names))
        if rows is not self._checked:
            check_noise(rows, arguments["timestep"], arguments["timestep_indices"])
            self._checked = rows
        return rows

    def _order_rows(self, arguments: dict[str, Any]) -> None:
        """Puts the others first, the video's rows behind them in tiles; says so by the indices."""
        order, place = self._order_and_place(arguments)
        for name in PER_ROW:
            arguments[name] = arguments[name].index_select(0, order)
        for name in INDICES:
            arguments[name] = place.index_select(0, arguments[name])

    def _order_and_place(self, arguments: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Which row stands at each place, and where each row stands; int64 ``[N]``.

        Made once for all steps: captured ones read both where they are.
        """
        rows, tiles = self._rows_of(arguments), self.session.tile_order
        device = arguments["position_ids"].device
        known = self._places
        if not known or known[0] is not rows or known[1] is not tiles or known[2] != device:
            video = rows.video.to(device)
            if tiles is not None:
                video = video[tiles[0].to(device)]
            order = torch.cat([rows.others.to(device), video])
            self._places = known = (rows, tiles, device, order, inverse_order(order))
        return known[3], known[4]


def audio_rows(latent_frames: int) -> int:
    """Rows of the sound of a video that has so many latent frames."""
    chunks = -(-max(0, latent_frames - LATENT_FIRST) // LATENT_CHUNK)
    return AUDIO_CHANNELS * round((CHUNK * chunks + FIRST) * AUDIO_LATENTS)
