"""The transformers of real models at the sizes that people run, with random weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.cases import CASES
from chipsparse import ScheduleConfig, SparsityConfig, find_profile

STEPS = 50
# The schedules of the first measurements: nearly all steps sparse, or 25 of 50 skipped, none of
# them one that computes everything.
EARLY = {
    "sparse": ScheduleConfig(),
    "sparse, half of the steps skipped": ScheduleConfig(
        actions=("dense", "refresh", *("skip", "sparse") * 24)
    ),
}
# Fields of the configs that say how many blocks there are in the first and the second list.
COUNTS = ("num_layers", "num_single_layers")
LEAST_BLOCKS = 2  # of a kind: see `last_blocks_only`
# How far the latents move per step, in their own deviation.
DRIFT = 0.05
# Deviation of the biases that scale, shift and gate: the blocks then have a say in the output, as
# in a trained model, and the hidden states stay of order one.
MODULATION = 0.2

Step = Callable[[int], dict[str, Any]]  # the arguments of a step's call
Inputs = Callable[[float, Any, int, torch.device, torch.dtype], Step]


@dataclass(frozen=True)
class FullModel:
    """A transformer class at one size.

    Attributes:
        case: the named case with its sizes.
        transformer_class: name of the class in diffusers.
        blocks: names of the model's lists of blocks.
        layers: blocks in each of these lists.
        config: what else differs from the class's defaults.
        tiny: what differs in a dry run.
        inputs: arguments of its calls for (scale, config, steps, device, dtype); a scale below 1
            is for dry runs.
        branches: guidance branches that a step calls one after the other.
        modulation: how the names of the biases end that get a deviation of `MODULATION`.
        density: share of the columns that those of the profile's qualities keep which keep least,
            where it is another at this size.
        counts: fields of the config with the blocks in each list; functions in ``config`` take
            all of these numbers.
        mixed: whether some modules stay in fp32, as diffusers loads the class.
    """

    case: str
    transformer_class: str
    blocks: tuple[str, ...]
    layers: tuple[int, ...]
    config: Mapping[str, Any]
    tiny: Mapping[str, Any]
    inputs: Inputs
    branches: tuple[str, ...] = ("cond",)
    modulation: tuple[str, ...] = ()
    density: float | None = None
    counts: tuple[str, ...] = COUNTS
    mixed: bool = False

    def qualities(self) -> dict[str, SparsityConfig]:
        """What is computed in each of the profile's qualities at this size."""
        found = find_profile(None, self.transformer_class).qualities
        least = min(config.attention.density for config in found.values())
        changes = {} if self.density is None else {"attention.density": self.density}
        return {
            name: config.override(changes if config.attention.density == least else {})
            for name, config in found.items()
        }

    def early(self) -> dict[str, SparsityConfig]:
        """What was measured first: as ``published`` but for the steps, and the case's columns.

        Where these are the same, so are the measured steps.
        """
        published = self.qualities()["published"]
        if self.case in CASES:
            published = published.override({"attention.density": CASES[self.case].density})
        return {name: replace(published, schedule=schedule) for name, schedule in EARLY.items()}

    def layers_of(self, depth: float) -> tuple[int, ...]:
        """Blocks in each list of a model with this share of them, `LEAST_BLOCKS` at least."""
        return tuple(max(LEAST_BLOCKS, round(depth * count)) for count in self.layers)

    def make(
        self, layers: tuple[int, ...], small: bool, device: torch.device, dtype: torch.dtype
    ) -> Any:
        """A model with random weights, made where it runs; the same at every call.

        Args:
            layers: blocks in each list.
            small: tiny, for a dry run.
            device: where it runs.
            dtype: of its weights.
        """
        import diffusers

        counts = dict(zip(self.counts, layers, strict=False))
        config = {**self.config, **(self.tiny if small else {}), **counts}
        config = {name: of(layers) if callable(of) else of for name, of in config.items()}
        before = torch.get_default_dtype()
        devices = [device] if device.type == "cuda" else []
        torch.set_default_dtype(dtype)
        try:
            with torch.device(device), torch.random.fork_rng(devices), torch.no_grad():
                torch.manual_seed(0)
                model = getattr(diffusers, self.transformer_class)(**config).eval()
                for name, parameter in model.named_parameters():
                    if name.endswith(self.modulation):
                        parameter.normal_(0, MODULATION)
        finally:
            torch.set_default_dtype(before)
        if self.mixed:
            keep_in_fp32(model)
        if not model._repeated_blocks:  # what is compiled
            lists = (getattr(model, name) for name in self.blocks)
            model._repeated_blocks = [type(blocks[0]).__name__ for blocks in lists]
        return model.requires_grad_(False)

    def pipe(self, transformer: Any) -> SimpleNamespace:
        """What `chipsparse.enable` takes for a pipeline of this transformer alone."""
        return SimpleNamespace(
            components={"transformer": transformer},
            scheduler=None,
            do_classifier_free_guidance=len(self.branches) > 1,
        )


def keep_in_fp32(model: Any) -> None:
    """Gives a model in half precision the parameters in fp32 that diffusers loads it with."""
    kept = set(model._keep_in_fp32_modules or ())
    for name, parameter in model.named_parameters():
        if kept & set(name.split(".")):
            parameter.data = parameter.data.float()


def call(transformer: Any, inputs: Step, branch: str, step: int, steps: int) -> torch.Tensor:
    """The output of one guidance branch at one of so many steps; of several streams the first."""
    named = getattr(transformer, "cache_context", None)  # not every model has caches
    position = {"step_index": step, "num_inference_steps": steps}
    with nullcontext() if named is None else named(branch, **position):
        output = transformer(**inputs(step))
    while not isinstance(output, torch.Tensor):
        output = output[0]
    return output


def normals(seed: int, device: torch.device, dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    """Gives normal tensors of a size, one after the other."""
    generator = torch.Generator(device).manual_seed(seed)
    return lambda *sizes: torch.randn(sizes, generator=generator, device=device, dtype=dtype)


def scaled(size: int, scale: float) -> int:
    """Rows or columns of latents, even."""
    return size if scale >= 1 else max(2, int(size * scale) // 2 * 2)


def video_latents(
    frames: int,
    rows: int,
    columns: int,
    scale: float,
    config: Any,
    device: torch.device,
    dtype: torch.dtype,
) -> Callable[[int], torch.Tensor]:
    """Normal latents that move a little at every step."""
    normal = normals(1, device, dtype)
    height, width = scaled(rows, scale), scaled(columns, scale)
    sizes = (1, config.in_channels, frames if scale >= 1 else 3, height, width)
    start, move = normal(*sizes), normal(*sizes)
    return lambda step: start + step * DRIFT * move


def hunyuan_inputs(
    scale: float, config: Any, steps: int, device: torch.device, dtype: torch.dtype
) -> Step:
    """720x1280, 129 frames, 256 text tokens that all count."""
    latents = video_latents(33, 90, 160, scale, config, device, dtype)
    normal = normals(2, device, dtype)
    text = 256 if scale >= 1 else 16
    constant = {
        "encoder_hidden_states": normal(1, text, config.text_embed_dim),
        "encoder_attention_mask": torch.ones(1, text, device=device, dtype=dtype),
        "pooled_projections": normal(1, config.pooled_projection_dim),
        "guidance": torch.full((1,), 6000.0, device=device, dtype=dtype),
        "return_dict": False,
    }
    times = torch.linspace(1000, 1, steps, device=device, dtype=dtype)
    return lambda step: constant | {"hidden_states": latents(step), "timestep": times[step, None]}


def wan_inputs(rows: int, columns: int) -> Inputs:
    """Latents of so many rows and columns, 81 frames, 512 text tokens."""

    def inputs(
        scale: float, config: Any, steps: int, device: torch.device, dtype: torch.dtype
    ) -> Step:
        latents = video_latents(21, rows, columns, scale, config, device, dtype)
        text = normals(2, device, dtype)(1, 512, config.text_dim)
        times = torch.linspace(1000, 1, steps, device=device).long()
        return lambda step: {
            "hidden_states": latents(step),
            "timestep": times[step, None],
            "encoder_hidden_states": text,
            "return_dict": False,
        }

    return inputs


def flux_inputs(
    scale: float, config: Any, steps: int, device: torch.device, dtype: torch.dtype
) -> Step:
    """1280x768, 512 text tokens."""
    normal = normals(1, device, dtype)
    rows, columns = scaled(48, scale), scaled(80, scale)
    text = 512 if scale >= 1 else 4
    moves = DRIFT * normal(steps, rows * columns, config.in_channels)
    latents = normal(rows * columns, config.in_channels) + moves.cumsum(0)
    times = torch.linspace(1, 0, steps + 1, device=device, dtype=dtype)
    row = torch.arange(rows * columns, device=device)
    constant = {
        "encoder_hidden_states": normal(1, text, config.joint_attention_dim),
        "pooled_projections": normal(1, config.pooled_projection_dim),
        "guidance": torch.full((1,), 3.5, device=device),
        "img_ids": torch.stack([row * 0, row // columns, row % columns], dim=1).to(dtype),
        "txt_ids": torch.zeros(text, 3, device=device, dtype=dtype),
        "return_dict": False,
    }
    return lambda step: (
        constant
        | {
            "hidden_states": latents[step, None],
            "timestep": times[step, None],
            "joint_attention_kwargs": {},  # the model takes entries out of it
        }
    )


def minimax_h3_inputs(latent_frames: int) -> Inputs:
    """768x1344 with sound, 512 text tokens; 5 s are 37 latent frames, 10 s 72, 15 s 102."""

    def inputs(
        scale: float, config: Any, steps: int, device: torch.device, dtype: torch.dtype
    ) -> Step:
        from diffusers.modular_pipelines.minimax_h3.before_denoise import (
            MiniMaxH3PrepareLayoutStep,
            MiniMaxH3SetTimestepsStep,
        )

        from chipsparse.pipelines.minimax_h3 import AUDIO_CHANNELS, audio_rows
        from chipsparse.pipelines.packed_rows import AUDIO, TEXT, VIDEO

        text, frames = (512, latent_frames) if scale >= 1 else (16, 7)
        sounds = audio_rows(frames) // AUDIO_CHANNELS
        *where, _, _ = MiniMaxH3PrepareLayoutStep.build_packed_sequence(
            torch.full((text,), TEXT),
            frames,
            scaled(48, scale),
            scaled(84, scale),
            sounds,
            config.patch_size,
            AUDIO_CHANNELS,
            AUDIO,
            VIDEO,
        )
        names = ("position_ids", "token_tags", "video_indices", "audio_indices", "text_indices")
        rows = dict(zip(names, (each.to(device) for each in where), strict=True))
        normal = normals(1, device, dtype)
        sizes = (
            1,
            rows["video_indices"].numel(),
            config.in_channels * math.prod(config.patch_size),
        )
        start, move = normal(*sizes), normal(*sizes)
        constant = {
            **rows,
            "audio_hidden_states": normal(1, AUDIO_CHANNELS * sounds, config.audio_in_channels),
            "encoder_hidden_states": normal(1, text, config.text_dim),
            "return_dict": False,
        }

        def arguments(step: int) -> dict[str, Any]:
            time = step / steps  # of the video; the sound is ahead of it
            timestep, which = MiniMaxH3SetTimestepsStep.build_row_timesteps(
                where[2], where[3], 0, 0, text, time, (1 + time) / 2, 1.0, 1.0
            )
            return constant | {
                "hidden_states": start + step * DRIFT * move,
                "timestep": timestep.to(device),
                "timestep_indices": which.to(device),
            }

        return arguments

    return inputs


def minimax_h3(case: str, latent_frames: int, density: float | None = None) -> FullModel:
    """MiniMax-H3 at one length."""
    return FullModel(
        case,
        transformer_class="MiniMaxH3Transformer3DModel",
        blocks=("transformer_blocks",),
        layers=(50,),
        config={},
        tiny={
            "num_attention_heads": 1,
            "hidden_size": 96,
            "ffn_dim": 256,
            "text_dim": 64,
            "time_embed_hidden_dim": 96,
            "time_embed_dim": 48,
        },
        inputs=minimax_h3_inputs(latent_frames),
        modulation=("adaln_proj.linear.bias",),
        density=density,
    )


def wan(case: str, layers: int, heads: int, width: int, rows: int, columns: int) -> FullModel:
    """Wan 2.1 text to video of one of its sizes."""
    return FullModel(
        case,
        transformer_class="WanTransformer3DModel",
        blocks=("blocks",),
        layers=(layers,),
        config={"num_attention_heads": heads, "attention_head_dim": 128, "ffn_dim": width},
        tiny={"num_attention_heads": 1, "ffn_dim": 256, "text_dim": 64},
        inputs=wan_inputs(rows, columns),
        branches=("cond", "uncond"),
    )


MODELS: Mapping[str, FullModel] = {
    model.case: model
    for model in (
        FullModel(
            "hunyuan_720p",
            transformer_class="HunyuanVideoTransformer3DModel",
            blocks=("transformer_blocks", "single_transformer_blocks"),
            layers=(20, 40),
            config={},
            tiny={"num_attention_heads": 1, "text_embed_dim": 64, "pooled_projection_dim": 32},
            inputs=hunyuan_inputs,
        ),
        wan("wan14b_720p", 40, 40, 13_824, 90, 160),
        wan("wan1b_480p", 30, 12, 8960, 60, 104),
        FullModel(
            "flux_1280x768",
            transformer_class="FluxTransformer2DModel",
            blocks=("transformer_blocks", "single_transformer_blocks"),
            layers=(19, 38),
            config={"guidance_embeds": True},
            tiny={"num_attention_heads": 1},
            inputs=flux_inputs,
            modulation=("norm.linear.bias", "norm1.linear.bias", "context.linear.bias"),
        ),
        minimax_h3("h3_5s", 37),
        minimax_h3("h3_10s", 72),
        minimax_h3("h3_15s", 102, 0.07),
    )
}


@contextmanager
def last_blocks_only(
    model: FullModel, transformer: Any, count: int = LEAST_BLOCKS
) -> Iterator[None]:
    """The model with the last ``count`` blocks of each kind; two are enough to compile and to tune.

    Two, since what a block gets from its like may be laid out otherwise than what the first gets.
    The last two, since caches of later layers are placed first: if any run sparse, these do.
    """
    lists = {name: getattr(transformer, name) for name in model.blocks}
    for name, blocks in lists.items():
        first = max(0, len(blocks) - count)
        setattr(transformer, name, torch.nn.ModuleList(blocks[first:]))
    try:
        yield
    finally:
        for name, blocks in lists.items():
            setattr(transformer, name, blocks)


@contextmanager
def without_useless_masks(model: FullModel, transformer: Any) -> Iterator[None]:
    """Drops the attention masks that blocks are given: all text tokens count here.

    Under a mask PyTorch leaves its fastest attention kernels, which is no fair baseline.
    """

    def drop(_module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, {**kwargs, "attention_mask": None}

    hooks = []
    if model.transformer_class == "HunyuanVideoTransformer3DModel":
        for name in model.blocks:
            for block in getattr(transformer, name):
                hooks.append(block.attn.register_forward_pre_hook(drop, with_kwargs=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
