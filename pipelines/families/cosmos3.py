"""Cosmos 3 (``Cosmos3OmniTransformer``): images and video, with sound and actions."""

from __future__ import annotations

import math

import torch

from chipsparse.layout import Grid, LayerKind
from chipsparse.pipelines.call_reader import Arguments, CallReader, remembered
from chipsparse.pipelines.family import Family
from chipsparse.pipelines.family_facts import (
    AttentionFacts,
    Config,
    ModuleNames,
    Sharing,
    SparseParts,
    TextPlace,
    TimestepFacts,
)
from chipsparse.pipelines.feed_forward_forms import MLPParts
from chipsparse.pipelines.packed_rows import video_last
from chipsparse.pipelines.token_order import TokenOrder
from chipsparse.reasons.calls import branch_left_alone
from chipsparse.reasons.reason import nothing_sparse
from chipsparse.skip.position import Place

STREAMS = ("vision", "sound", "action")
INDICES = [f"{stream}_{kind}_indexes" for stream in STREAMS for kind in ("sequence", "mse_loss")]
FP8_STEPS = "_cosmos3_mixed_precision_runtime"  # what its pipelines leave on such a transformer
ACTIONS_ALONE = "all frames are given, and only actions are generated"
OTHER_GRIDS = "they have other videos than the first ones of their steps (control)"


def kinds(config: Config) -> tuple[LayerKind, ...]:
    """The kind of all layers."""
    layers = config["num_hidden_layers"]
    width = config["intermediate_size"]
    linears = 3 if config["hidden_act"] == "silu" else 2
    shared = config["num_key_value_heads"] / config["num_attention_heads"]
    projections = math.ceil(2 + 2 * shared)
    return (LayerKind("layer", layers, width, mlp_linears=linears, projections=projections),)


def heads(config: Config) -> tuple[int, int]:
    """The attention heads of queries, and channels of each."""
    return config["num_attention_heads"], config["head_dim"]


def grids(config: Config, latents: Grid) -> tuple[Grid, ...]:
    """The grid of one video, whose last patches are filled up."""
    rows, columns = (math.ceil(edge / config["latent_patch_size"]) for edge in latents[1:])
    return ((latents[0], rows, columns),)


class Cosmos3Reader(CallReader):
    """Reads sequences of the prompt, videos, sound and actions; control videos are grids, too."""

    _began: tuple[int, tuple[Grid, ...]] = (0, ())  # a generation and its first grids

    def grids(self, arguments: Arguments) -> tuple[Grid, ...]:
        """Return the grids of control videos, then that of the generated one."""
        return tuple((t, h, w) for t, h, w in arguments["vision_token_shapes"])

    def text_tokens(self, arguments: Arguments) -> int:
        """Return the number of rows that are of no video."""
        tokens = sum(map(math.prod, self.grids(arguments)))
        return int(arguments["sequence_length"]) - tokens

    def latents(self, arguments: Arguments) -> torch.Tensor:
        """Return the video that is generated, ``[1, C, F, H, W]``."""
        video: torch.Tensor = arguments["vision_tokens"][-1]
        return video.reshape(1, *video.shape[-4:])

    def knows(self, place: Place, arguments: Arguments) -> bool:
        """Return whether a call makes frames, of the grids that the generation began with."""
        grids = self.grids(arguments)
        if place.generation != self._began[0]:
            self._began = place.generation, grids
        return makes_frames(arguments) and grids == self._began[1]

    def observe(self, place: Place, arguments: Arguments) -> bool:
        """Report other grids, or that only actions are generated."""
        if makes_frames(arguments):
            self.session.report.add(branch_left_alone(place.branch, OTHER_GRIDS))
            return False
        self.session.report.add(nothing_sparse("model.actions_alone", ACTIONS_ALONE))
        return True

    def why_not_captured(self) -> str | None:
        """Return a reason where first and last steps compute with weights in FP8 otherwise."""
        if getattr(self.model, FP8_STEPS, None) is not None:
            return "its linears in FP8 compute in another precision at some steps"
        return None


class Cosmos3Order(TokenOrder):
    """Puts the video's rows last, in tiles.

    The model finds rows by indices, so to put them in order is to change those. Outputs follow the
    indices.
    """

    _orders = remembered(video_last)

    def order_inputs(self, arguments: Arguments) -> None:
        """Change the indices of all streams."""
        tiles = (self.session.tile_order or ())[:1]
        video = arguments["vision_sequence_indexes"]
        positions = arguments["position_ids"]
        order, place = self._orders(positions, video, *tiles)
        arguments["position_ids"] = positions.index_select(-1, order)
        for name in INDICES:
            if arguments.get(name) is not None:
                arguments[name] = place.index_select(0, arguments[name])


# Attention and feed-forward layers of the video's rows, after keys of the prompt. The prompt has
# weights of its own and sees, causally, itself alone: that is left. Keys of prompt, sound and
# actions are always kept, and the rows of sound and actions are computed in full.
COSMOS3 = Family(
    transformer_class="Cosmos3OmniTransformer",
    title="Cosmos 3: text, image and video to video or image, with sound, control and actions",
    sparse=SparseParts(
        attention="the video's, to all; the prompt's is left, sound and actions are exact",
        mlp="feed-forward (gated) of the video tokens",
    ),
    modules=ModuleNames(
        blocks=("layers",),
        attention="self_attn",
        mlp="mlp_moe_gen",
        mlp_parts=MLPParts("up_proj", "down_proj", "gate_proj", "act_fn"),
    ),
    kinds=kinds,
    heads=heads,
    grids=grids,
    attention=AttentionFacts("processor", shares_keys=True),
    text=TextPlace("first", exact=True),  # and whatever else is no row of a video
    timestep=TimestepFacts("vision_timesteps"),
    sharing=Sharing(
        why_whole="it finds rows of text, sound and video by their places among all rows",
    ),
    reader=Cosmos3Reader,
    tokens=Cosmos3Order,
)


def makes_frames(arguments: Arguments) -> bool:
    """Return whether the report is to say anything of a video in this call."""
    return bool(arguments["vision_mse_loss_indexes"].numel() > 0)
