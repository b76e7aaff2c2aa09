"""The transformers of real models at the sizes that people run, with random weights.

Sizes are the defaults of diffusers' classes and pipelines, unless a comment says otherwise; there
is no padding. `MODELS` are measured where no case is named, `FAMILIES` by name.
"""

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
LEAST_BLOCKS = 2  # of a kind: see `last_blocks_only`
# How far the latents move per step, in their own deviation.
DRIFT = 0.05
# Deviation of the biases that scale, shift and gate: the blocks then have a say in the output, as
# in a trained model, and the hidden states stay of order one.
MODULATION = 0.2
# In a dry run: frames, rows and columns of latents, tokens of a text.
GRID, TEXT = (3, 12, 12), 16
TINY = {"num_attention_heads": 1}
DOUBLE, SINGLE, VISUAL = (f"{name}transformer_blocks" for name in ("", "single_", "visual_"))

Step = Callable[[int], dict[str, Any]]  # the arguments of a step's call


@dataclass
class Tensors:
    """What the inputs of a model are made of.

    A size is a number, or the name of the config's field that says it.

    Attributes:
        tiny: few tokens, for a dry run.
        config: of the transformer.
        steps: of the generation.
    """

    tiny: bool
    config: Any
    steps: int
    device: torch.device
    dtype: torch.dtype

    def __post_init__(self) -> None:
        self._generator = torch.Generator(self.device).manual_seed(1)

    def normal(self, *sizes: Any) -> torch.Tensor:
        """Normal numbers."""
        shape = [size if isinstance(size, int) else self.config[size] for size in sizes]
        options: dict[str, Any] = {"generator": self._generator, "dtype": self.dtype}
        return torch.randn(shape, device=self.device, **options)

    def grid(self, *sizes: int) -> tuple[int, ...]:
        """Frames, rows and columns of latents."""
        return tuple(map(min, sizes, GRID)) if self.tiny else sizes

    def text(self, tokens: int, channels: Any) -> torch.Tensor:
        """``[1, tokens, channels]``, fewer tokens in a dry run."""
        return self.normal(1, TEXT if self.tiny else tokens, channels)

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
            named = latents if names[0] == "hidden_states" else [*latents]
            return {**constant, names[0]: named, names[1]: time, "return_dict": False}

        return arguments


@dataclass(frozen=True)
class FullModel:
    """A transformer class at one size.

    Attributes:
        case: its name.
        transformer_class: name of the class in diffusers.
        blocks: names of the model's lists of blocks.
        layers: blocks in each of these lists.
        inputs: makes the arguments of its calls.
        config: what else differs from the class's defaults; functions take the numbers of blocks.
        tiny: what differs in a dry run.
        branches: guidance branches that a step calls one after the other.
        modulation: how the names of the biases end that get a deviation of `MODULATION`.
        density: share of the columns that those of the profile's qualities keep which keep least,
            where it is another at this size.
        counts: fields of the config with the blocks in each list.
        mixed: whether some modules stay in fp32, as diffusers loads the class.
    """

    case: str
    transformer_class: str
    blocks: tuple[str, ...]
    layers: tuple[int, ...]
    inputs: Callable[[Tensors], Step]
    config: Mapping[str, Any]
    tiny: Mapping[str, Any]
    branches: tuple[str, ...] = ("cond",)
    modulation: tuple[str, ...] = ()
    density: float | None = None
    counts: tuple[str, ...] = ("num_layers", "num_single_layers")
    mixed: bool = False

    def qualities(self) -> dict[str, SparsityConfig]:
        """The config of each of the profile's qualities at this size."""
        known = find_profile(None, self.transformer_class).qualities
        least = min(config.attention.density for config in known.values())
        changes = {} if self.density is None else {"attention.density": self.density}
        return {
            name: config.override(changes if config.attention.density == least else {})
            for name, config in known.items()
        }

    def nearly_all_sparse(self) -> SparsityConfig:
        """``published`` with nearly all steps sparse, and the columns of the case of this name."""
        config = replace(self.qualities()["published"], schedule=ScheduleConfig())
        if self.case in CASES:
            config = config.override({"attention.density": CASES[self.case].density})
        return config

    def layers_of(self, depth: float) -> tuple[int, ...]:
        """Blocks in each list of a model with this share of them, `LEAST_BLOCKS` at least."""
        return tuple(max(LEAST_BLOCKS, round(depth * count)) for count in self.layers)

    def make(
        self, layers: tuple[int, ...], tiny: bool, device: torch.device, dtype: torch.dtype
    ) -> Any:
        """A model with so many blocks and random weights, the same at every call."""
        import diffusers

        counts = dict(zip(self.counts, layers, strict=False))
        config = {**self.config, **(self.tiny if tiny else {}), **counts}
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

    def step(self, transformer: Any, tiny: bool, steps: int = STEPS) -> Step:
        """The arguments of its calls."""
        made = Tensors(tiny, transformer.config, steps, transformer.device, transformer.dtype)
        with made.device:
            return self.inputs(made)

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


MODELS: dict[str, FullModel] = {}
FAMILIES: dict[str, FullModel] = {}


def family(name: str, blocks: str, *layers: int, to: Any = FAMILIES, **others: Any) -> Any:
    """Adds a model with so many layers in its lists of blocks; its case is called as its inputs."""

    def add(inputs: Callable[[Tensors], Step]) -> Any:
        fields = {"case": inputs.__name__, "config": {}, "tiny": TINY, "mixed": True, **others}
        fields |= {"blocks": tuple(blocks.split()), "layers": layers, "inputs": inputs}
        to[fields["case"]] = FullModel(transformer_class=name, **fields)
        return inputs

    return add


def places(*sizes: int) -> torch.Tensor:
    """The places of the tokens of a grid, fp32 ``[N, dimensions]``."""
    return torch.cartesian_prod(*(torch.arange(size).float() for size in sizes))


@family(
    *("HunyuanVideoTransformer3DModel", f"{DOUBLE} {SINGLE}", 20, 40),
    to=MODELS,
    mixed=False,
    tiny={**TINY, "text_embed_dim": 64, "pooled_projection_dim": 32},
)
def hunyuan_720p(made: Tensors) -> Step:
    """720x1280, 129 frames, 256 text tokens that all count."""
    text = made.text(256, "text_embed_dim")
    return made.call(
        *("in_channels", *made.grid(33, 90, 160)),
        encoder_hidden_states=text,
        encoder_attention_mask=torch.ones(text.shape[:2], dtype=made.dtype),
        pooled_projections=made.normal(1, "pooled_projection_dim"),
        guidance=torch.full((1,), 6000.0, dtype=made.dtype),
    )


def wan(made: Tensors, *grid: int, **others: Any) -> Step:
    """512 text tokens, which the model's cross-attention counts on."""
    text = made.normal(1, 512, "text_dim")
    return made.call("in_channels", *grid, encoder_hidden_states=text, **others)


WAN: dict[str, Any] = {
    **{"to": MODELS, "mixed": False, "branches": ("cond", "uncond")},
    "tiny": {**TINY, "ffn_dim": 256, "text_dim": 64},
}


@family("WanTransformer3DModel", "blocks", 40, **WAN)
def wan14b_720p(made: Tensors) -> Step:
    """720x1280, 81 frames."""
    return wan(made, *made.grid(21, 90, 160))


@family(
    *("WanTransformer3DModel", "blocks", 30),
    **WAN,
    config={"num_attention_heads": 12, "ffn_dim": 8960},
)
def wan1b_480p(made: Tensors) -> Step:
    """480x832, 81 frames."""
    return wan(made, *made.grid(21, 60, 104))


@family(
    *("FluxTransformer2DModel", f"{DOUBLE} {SINGLE}", 19, 38),
    to=MODELS,
    mixed=False,
    config={"guidance_embeds": True},
    modulation=("norm.linear.bias", "norm1.linear.bias", "context.linear.bias"),
)
def flux_1280x768(made: Tensors) -> Step:
    """FLUX.1-dev, 512 text tokens."""
    (_, rows, columns), text = made.grid(1, 48, 80), made.text(512, "joint_attention_dim")
    step = made.call(
        *(rows * columns, "in_channels"),
        first=1,
        encoder_hidden_states=text,
        pooled_projections=made.normal(1, "pooled_projection_dim"),
        guidance=torch.full((1,), 3.5),
        img_ids=places(1, rows, columns).to(made.dtype),
        txt_ids=torch.zeros(text.shape[1], 3, dtype=made.dtype),
    )
    return lambda number: {**step(number), "joint_attention_kwargs": {}}  # the model takes some out


def minimax_h3(case: str, latent_frames: int, density: float | None = None) -> None:
    """Adds MiniMax-H3 at one length: 5 s are 37 latent frames, 10 s 72, 15 s 102."""
    tiny = {"hidden_size": 96, "ffn_dim": 256, "text_dim": 64, "time_embed_hidden_dim": 96}

    @family(
        *("MiniMaxH3Transformer3DModel", DOUBLE, 50),
        to=MODELS,
        case=case,
        mixed=False,
        density=density,
        tiny={**TINY, **tiny, "time_embed_dim": 48},
        modulation=("adaln_proj.linear.bias",),
    )
    def inputs(made: Tensors) -> Step:
        """768x1344 with sound, 512 text tokens."""
        from diffusers.modular_pipelines.minimax_h3 import before_denoise as steps

        from chipsparse.pipelines.minimax_h3 import AUDIO_CHANNELS, audio_rows
        from chipsparse.pipelines.packed_rows import AUDIO, TEXT, VIDEO

        prompt, (_, *size) = made.text(512, "text_dim"), made.grid(1, 48, 84)
        frames, patch = 7 if made.tiny else latent_frames, made.config.patch_size
        sounds, words = audio_rows(frames) // AUDIO_CHANNELS, prompt.shape[1]
        with torch.device("cpu"):
            *where, _, _ = steps.MiniMaxH3PrepareLayoutStep.build_packed_sequence(
                *(torch.full((words,), TEXT), frames, *size, sounds, patch),
                *(AUDIO_CHANNELS, AUDIO, VIDEO),
            )
        names = ("position_ids", "token_tags", "video_indices", "audio_indices", "text_indices")
        rows = {n: each.to(made.device) for n, each in zip(names, where, strict=True)}
        step = made.call(
            *(rows["video_indices"].numel(), made.config.in_channels * math.prod(patch)),
            audio_hidden_states=made.normal(1, AUDIO_CHANNELS * sounds, "audio_in_channels"),
            encoder_hidden_states=prompt,
            **rows,
        )

        def arguments(number: int) -> dict[str, Any]:
            time = number / made.steps  # of the video; the sound is ahead of it
            with torch.device("cpu"):
                timestep, which = steps.MiniMaxH3SetTimestepsStep.build_row_timesteps(
                    *(where[2], where[3], 0, 0, words, time, (1 + time) / 2, 1.0, 1.0)
                )
            own = {"timestep": timestep, "timestep_indices": which}
            return {**step(number), **{name: own[name].to(made.device) for name in own}}

        return arguments


minimax_h3("h3_5s", 37)
minimax_h3("h3_10s", 72)
minimax_h3("h3_15s", 102, 0.07)


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
