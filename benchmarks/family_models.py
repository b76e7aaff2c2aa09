"""The transformers of further families, with random weights, as their pipelines call them.

Sizes are the defaults of diffusers' classes and pipelines, unless a comment says otherwise; there
is one guidance branch, and no padding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.full_models import DRIFT, FullModel, Step, normals

# In a dry run: frames, rows and columns of latents, tokens of a text.
GRID, TEXT = (3, 12, 12), 16
TINY = {"num_attention_heads": 1}
DOUBLE, SINGLE, VISUAL = (f"{name}transformer_blocks" for name in ("", "single_", "visual_"))
FAMILIES: dict[str, FullModel] = {}


@dataclass
class Tensors:
    """What inputs are made of; for the fields see `FullModel`.

    A size is a number, or the name of the config's field that says it.
    """

    scale: float
    config: Any
    steps: int
    device: torch.device
    dtype: torch.dtype

    def __post_init__(self) -> None:
        self._normal = normals(1, self.device, self.dtype)

    def normal(self, *sizes: Any) -> torch.Tensor:
        return self._normal(*(x if isinstance(x, int) else self.config[x] for x in sizes))

    def grid(self, *sizes: int) -> tuple[int, ...]:
        """Frames, rows and columns of latents."""
        return sizes if self.scale >= 1 else tuple(map(min, sizes, GRID))

    def text(self, tokens: int, channels: Any) -> torch.Tensor:
        """``[1, tokens, channels]``, fewer tokens in a dry run."""
        return self.normal(1, tokens if self.scale >= 1 else TEXT, channels)

    def call(
        self,
        *sizes: Any,
        names: tuple[str, str] = ("hidden_states", "timestep"),
        first: float = 1000,
        rows: int = 1,
        **constant: Any,
    ) -> Step:
        """Arguments with moving latents ``[1, *sizes]``, and a timestep in so many rows.

        Latents with another name than usual are in a list.
        """
        start, move = self.normal(1, *sizes), self.normal(1, *sizes)
        times = torch.linspace(first, first / self.steps, self.steps)

        def arguments(step: int) -> dict[str, Any]:
            latents, time = start + step * DRIFT * move, times[step].expand(rows)
            found = latents if names[0] == "hidden_states" else [*latents]
            return {**constant, names[0]: found, names[1]: time, "return_dict": False}

        return arguments


def family(name: str, blocks: str, *layers: int, **others: Any) -> Any:
    """Adds a model with so many layers in its lists of blocks; its case is called as its inputs."""

    def add(make: Callable[[Tensors], Step]) -> Any:
        def inputs(*given: Any) -> Step:
            made = Tensors(*given)
            with made.device:
                return make(made)

        found = {"case": make.__name__, "config": {}, "tiny": TINY, "mixed": True, **others}
        found |= {"blocks": tuple(blocks.split()), "layers": layers, "inputs": inputs}
        FAMILIES[found["case"]] = FullModel(transformer_class=name, **found)
        return make

    return add


def places(*sizes: int) -> torch.Tensor:
    """Where the tokens of a grid are, fp32 ``[N, dimensions]``."""
    return torch.cartesian_prod(*(torch.arange(size).float() for size in sizes))


@family(
    *("LTX2VideoTransformer3DModel", DOUBLE, 48),
    tiny={
        **{"num_attention_heads": 1, "cross_attention_dim": 128},
        **{"audio_num_attention_heads": 1, "audio_cross_attention_dim": 64},
    },
)
def ltx2(made: Tensors) -> Step:
    """512x768, 121 frames, and their sound, 25 tokens a second."""
    frames, rows, columns = made.grid(16, 16, 24)
    sound = made.text(126, "audio_in_channels")
    return made.call(
        *(frames * rows * columns, "in_channels"),
        num_frames=frames,
        height=rows,
        width=columns,
        audio_hidden_states=sound,
        audio_num_frames=sound.shape[1],
        encoder_hidden_states=made.text(1024, "caption_channels"),
        audio_encoder_hidden_states=made.text(1024, "caption_channels"),
    )


# Layers that refine are not counted: all are made, and none run sparse.
@family(
    *("ZImageTransformer2DModel", "layers", 30),
    counts=("n_layers",),
    tiny={"dim": 128, "n_heads": 1, "n_kv_heads": 1},
)
def z_image(made: Tensors) -> Step:
    """1024x1024."""
    sizes, text = ("in_channels", *made.grid(1, 128, 128)), [*made.text(256, "cap_feat_dim")]
    return made.call(*sizes, names=("x", "t"), first=1, cap_feats=text)


@family("QwenImage21Transformer2DModel", DOUBLE, 32)
def qwen_image21(made: Tensors) -> Step:
    """1024x1024 behind kept keys of a prompt, as all steps but the first, which makes those."""
    from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21KVCache

    grid, prompt = made.grid(1, 64, 64), made.text(256, "context_in_dim")
    text, tokens = prompt.shape[1], math.prod(grid)
    kept = QwenImage21KVCache(made.config.num_layers)
    for layer in kept.layer_caches:
        sizes = (1, text, "num_attention_heads", "attention_head_dim")
        layer.store(made.normal(*sizes), made.normal(*sizes))
    return made.call(
        *(tokens, "in_channels"),
        first=1,
        encoder_hidden_states=prompt,
        img_shapes=[[grid]],
        img_mask=(torch.arange(text + tokens // 4) >= text)[None],  # one for four tokens
        kv_cache=kept,
        kv_cache_mode="cached",
    )


# As many blocks see the text alone as see the image alone.
@family("Flux3Transformer2DModel", f"txt_mode_blocks {SINGLE}", 5, 28)
def flux3(made: Tensors) -> Step:
    """1024x1024."""
    (_, rows, columns), text = made.grid(1, 64, 64), made.text(512, "joint_attention_dim")
    return made.call(
        *(rows * columns, "in_channels"),
        first=1,
        encoder_hidden_states=text,
        img_ids=places(1, rows, columns, 1) / 2,
        txt_ids=places(1, 1, 1, text.shape[1]),
    )


# Of 5 Lite, 2B, as released, and of 6 by its docstring.
LITE = {"in_visual_dim": 16, "out_visual_dim": 16, "model_dim": 1792, "ff_dim": 7168}
FLAGS = ("ca_rope", "cross_gates", "fix_modulation")
KANDINSKY: dict[str, Any] = {
    "counts": ("num_visual_blocks",),
    "tiny": {"model_dim": 128, "ff_dim": 256},
    "modulation": ("modulation.out_layer.bias",),  # begin as zeros
}


@family(
    *("Kandinsky5Transformer3DModel", VISUAL, 32),
    case="kandinsky5",
    config={**LITE, "visual_cond": True},
    **KANDINSKY,
)
@family(
    *("Kandinsky6Transformer3DModel", VISUAL, 60),
    case="kandinsky6",
    config=dict.fromkeys(FLAGS, True),
    **KANDINSKY,
)
def kandinsky(made: Tensors) -> Step:
    """512x768, 121 frames, in Kandinsky 6 with sound; latents of a picture beside the others."""
    grid, text = made.grid(31, 64, 96), made.text(512, "in_text_dim")
    others: Any = {"text_rope_pos": torch.arange(text.shape[1])}
    if "in_audio_dim" in made.config:  # 43 tokens a second
        others = {"audio_hidden_states": made.text(218, "in_audio_dim")}
    return made.call(
        *(*grid, 2 * made.config.in_visual_dim + 1),
        encoder_hidden_states=text,
        pooled_projections=made.normal(1, "in_text_dim2"),
        visual_rope_pos=(torch.arange(grid[0]), *(torch.arange(x // 2) for x in grid[1:])),
        **others,
    )


def wan(made: Tensors, *grid: int, **others: Any) -> Step:
    text = made.text(512, "text_dim")
    return made.call("in_channels", *grid, encoder_hidden_states=text, **others)


# Behind which blocks the control is added is no matter for the time.
@family(
    *("WanVACETransformer3DModel", "blocks vace_blocks", 40, 8),
    counts=("num_layers",),
    config={"vace_layers": lambda layers: [*range(layers[1])]},
)
def wan_vace(made: Tensors) -> Step:
    """480x832, 81 frames."""
    grid = made.grid(21, 60, 104)
    return wan(made, *grid, control_hidden_states=made.normal(1, "vace_in_channels", *grid))


# Channels by the class's docstring. It adds faces to each fifth block: --depth 0.125 at least.
@family(
    *("WanAnimateTransformer3DModel", "blocks", 40),
    config={"added_kv_proj_dim": 5120},
    tiny={
        **{"num_attention_heads": 1, "ffn_dim": 256, "added_kv_proj_dim": 128},
        **{"inject_face_latents_blocks": 2, "motion_encoder_size": 16},
    },
)
def wan_animate(made: Tensors) -> Step:
    """720x1280, 77 frames behind a reference, with poses and faces."""
    (frames, *size), face = made.grid(21, 90, 160), ["motion_encoder_size"] * 2
    return wan(
        made,
        frames,
        *size,
        encoder_hidden_states_image=made.normal(1, 257, "image_dim"),
        pose_hidden_states=made.normal(1, "latent_channels", frames - 1, *size),
        face_pixel_values=made.normal(1, 3, 4 * frames - 7, *face),
    )


def earlier(made: Tensors, grid: Any, *names: str, batch: Any = ()) -> dict[str, Any]:
    """Numbers of frames long ago, before, just before and now; latents of all but the last."""
    counts = (16, 2, 2, grid[0])
    numbers = torch.arange(sum(counts)).expand(*batch, -1).split(counts, -1)
    found = {f"indices_{name}": each for name, each in zip(names, numbers, strict=True)}
    for name, count in zip(names[:3], counts, strict=False):
        found[name] = made.normal(1, "in_channels", count, *grid[1:])
    return found


@family("HeliosTransformer3DModel", "blocks", 40)
def helios(made: Tensors) -> Step:
    """384x640, a chunk of 33 frames."""
    grid, past = made.grid(9, 48, 80), (f"latents_history_{x}" for x in ("long", "mid", "short"))
    return wan(made, *grid, **earlier(made, grid, *past, "hidden_states", batch=(1,)))


@family(
    *("HunyuanVideoFramepackTransformer3DModel", f"{DOUBLE} {SINGLE}", 20, 40),
    config={"has_image_proj": True, "has_clean_x_embedder": True},  # its forward wants both
)
def framepack(made: Tensors) -> Step:
    """720x1280, a section of 33 frames, 256 text tokens behind a picture."""
    grid, text = made.grid(9, 90, 160), made.text(256, "text_embed_dim")
    names = ("latents_history_4x", "latents_history_2x", "latents_clean", "latents")
    return made.call(
        *("in_channels", *grid),
        encoder_hidden_states=text,
        encoder_attention_mask=torch.ones(text.shape[:2]),
        pooled_projections=made.normal(1, "pooled_projection_dim"),
        image_embeds=made.text(729, "image_proj_dim"),
        guidance=torch.tensor([6000.0]),
        **earlier(made, grid, *names),
    )


# Of HiDream-I1 as released; blocks behind Llama's last layer see that once more.
HIDREAM: dict[str, Any] = {
    **{"patch_size": 2, "in_channels": 16, "axes_dims_rope": (64, 32, 32)},
    "caption_channels": [4096, 4096],
    "llama_layers": lambda layers: [min(layer, 31) for layer in range(sum(layers))],
}


@family(
    *("HiDreamImageTransformer2DModel", "double_stream_blocks single_stream_blocks", 16, 32),
    config=HIDREAM,
)
def hidream(made: Tensors) -> Step:
    """1024x1024, 128 tokens of T5 and of each layer of Llama."""
    return made.call(
        *("in_channels", *made.grid(1, 128, 128)[1:]),
        names=("hidden_states", "timesteps"),
        encoder_hidden_states_t5=made.text(128, 4096),
        encoder_hidden_states_llama3=made.text(128, 4096).expand(32, 1, -1, -1),
        pooled_embeds=made.normal(1, "text_emb_dim"),
    )


@family(
    *("Cosmos3OmniTransformer", "layers", 36),
    counts=("num_hidden_layers",),
    tiny={"num_attention_heads": 1, "num_key_value_heads": 1, "hidden_size": 64},
)
def cosmos3(made: Tensors) -> Step:
    """720x1280, 189 frames, behind 512 text tokens."""
    frames, *size = made.grid(48, 45, 80)
    shape = (frames, *(math.ceil(side / 2) for side in size))
    text, tokens = made.text(512, 1).shape[1], math.prod(shape)
    ids = places(*shape).T
    ids[0] += text + made.config.unified_3d_mrope_temporal_modality_margin
    prompt, video = torch.arange(text + tokens).split([text, tokens])
    return made.call(
        *("latent_channel", frames, *size),
        names=("vision_tokens", "vision_timesteps"),
        rows=tokens,
        position_ids=torch.cat([prompt.expand(3, -1), ids], dim=1),
        und_len=text,
        sequence_length=text + tokens,
        vision_token_shapes=[shape],
        input_ids=prompt,
        text_indexes=prompt,
        vision_sequence_indexes=video,
        vision_mse_loss_indexes=video,
        vision_noisy_frame_indexes=[torch.arange(frames)],
    )
