"""The transformers of real models at the sizes that people run, with random weights.

Sizes are the defaults of diffusers' classes and pipelines, unless a comment says otherwise; there
is no padding.
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import yaml

from benchmarks.cases import CASES
from chipsparse import ScheduleConfig, SparsityConfig, find_profile
from chipsparse.config import ByCost
from chipsparse.layout import ModelLayout
from chipsparse.pipelines.registry import FAMILIES
from chipsparse.sparse.cost_model.relative_cost import sparse_cost

STEPS = 50
# The distance that latents move per step, in their own deviation.
DRIFT = 0.05
# Biases that scale, shift and gate, and their deviation: the blocks then have a say in the output,
# as in a trained model, and the hidden states stay of order one.
MODULATED = (
    "norm.linear.bias",
    "norm1.linear.bias",
    "context.linear.bias",
    "adaln_proj.linear.bias",
    "modulation.out_layer.bias",
)
MODULATION = 0.2
# In a dry run: frames, rows and columns of latents, tokens of a text.
TINY_GRID = (3, 12, 12)
TINY_TEXT = 16

Step = Callable[[int], dict[str, Any]]  # the arguments of a step's call


@dataclass
class Tensors:
    """The random tensors that the inputs of a model consist of.

    A size is a number, or the name of the config's field that says it.
    """

    tiny: bool  # few tokens, for a dry run
    grid: tuple[int, ...]  # frames, rows and columns of the latents
    config: Any  # of the transformer
    device: torch.device
    dtype: torch.dtype

    def __post_init__(self) -> None:
        self._generator = torch.Generator(self.device).manual_seed(1)

    def normal(self, *sizes: int | str) -> torch.Tensor:
        """A normal tensor of these sizes; another one at each call."""
        shape = [self.config[size] if isinstance(size, str) else size for size in sizes]
        options: dict[str, Any] = {"generator": self._generator, "dtype": self.dtype}
        return torch.randn(shape, device=self.device, **options)

    def text(self, tokens: int, channels: int | str) -> torch.Tensor:
        """Embeddings ``[1, tokens, channels]``, fewer tokens in a dry run."""
        return self.normal(1, TINY_TEXT if self.tiny else tokens, channels)

    def call(
        self,
        *sizes: int | str,
        names: tuple[str, str] = ("hidden_states", "timestep"),
        first: float = 1000,
        rows: int = 1,
        **constant: Any,
    ) -> Step:
        """Arguments with moving latents ``[1, *sizes]``, and a timestep in so many rows.

        Latents with another name than usual are in a list.
        """
        start = self.normal(1, *sizes)
        move = self.normal(1, *sizes)
        times = torch.linspace(first, first / STEPS, STEPS)

        def arguments(step: int) -> dict[str, Any]:
            latents = start + step * DRIFT * move
            time = times[step].expand(rows)
            named = latents if names[0] == "hidden_states" else [*latents]
            return {**constant, names[0]: named, names[1]: time, "return_dict": False}

        return arguments


@dataclass(frozen=True)
class FullModel:
    """A transformer class at one size: an entry of ``models.yaml``, which says what fields are."""

    case: str
    transformer_class: str
    blocks: Sequence[str]
    inputs: str
    grid: Sequence[int]
    tiny: Mapping[str, Any]
    config: Mapping[str, Any] = field(default_factory=dict)
    guided: bool = False
    packed: int = 1

    @property
    def branches(self) -> tuple[str, ...]:
        """The names of its guidance branches, in the order of their calls."""
        return ("cond", "uncond") if self.guided else ("cond",)

    def qualities(self) -> dict[str, SparsityConfig]:
        """The config of each of the shipped profile's qualities."""
        return dict(find_profile(None, self.transformer_class).qualities)

    def layout(self) -> ModelLayout:
        """The sizes of a call without its text, by which a quality decides on sparse steps."""
        import diffusers

        kind = getattr(diffusers, self.transformer_class)
        parameters = inspect.signature(kind.__init__).parameters
        defaults = {name: item.default for name, item in parameters.items()}
        frames, rows, columns = self.grid
        layout: ModelLayout = FAMILIES[self.transformer_class].planned_layout(
            {**defaults, **self.config},
            latents=(frames, self.packed * rows, self.packed * columns),
            text_tokens=0,
        )
        return layout

    def decided(self, config: SparsityConfig) -> SparsityConfig:
        """A config with the form of its schedule that it takes at this size."""
        form = config.schedule.form
        if not isinstance(form, ByCost):
            return config
        masked = FAMILIES[self.transformer_class].sparse.masked
        taken = form.taken(sparse_cost(config, self.layout(), masked))
        return replace(config, schedule=replace(config.schedule, form=taken))

    def nearly_all_sparse(self) -> SparsityConfig:
        """``chipmunk`` with nearly all steps sparse, and the columns of the case of this name."""
        config = replace(self.qualities()["chipmunk"], schedule=ScheduleConfig())
        if self.case in CASES:
            config = config.override({"attention.density": CASES[self.case].density})
        return config

    def make(self, tiny: bool, device: torch.device, dtype: torch.dtype) -> Any:
        """A model with random weights, the same at every call."""
        import diffusers

        config = {**self.config, **(self.tiny if tiny else {})}
        before = torch.get_default_dtype()
        devices = [device] if device.type == "cuda" else []
        torch.set_default_dtype(dtype)
        try:
            with torch.device(device), torch.random.fork_rng(devices), torch.no_grad():
                torch.manual_seed(0)
                model = getattr(diffusers, self.transformer_class)(**config).eval()
        finally:
            torch.set_default_dtype(before)
        kept_in_fp32 = set(model._keep_in_fp32_modules or ())  # by diffusers when it loads weights
        generator = torch.Generator(device).manual_seed(2)
        for name, parameter in model.named_parameters():
            if name.endswith(MODULATED):
                parameter.data.normal_(0, MODULATION, generator=generator)
            if kept_in_fp32 & set(name.split(".")):
                parameter.data = parameter.data.float()
        if not model._repeated_blocks:  # those that `compile_repeated_blocks` compiles
            lists = (getattr(model, name) for name in self.blocks)
            model._repeated_blocks = [type(blocks[0]).__name__ for blocks in lists]
        return model.requires_grad_(False)

    def step(self, transformer: Any, tiny: bool) -> Step:
        """The arguments of its calls."""
        grid = tuple(map(min, self.grid, TINY_GRID)) if tiny else tuple(self.grid)
        tensors = Tensors(tiny, grid, transformer.config, transformer.device, transformer.dtype)
        make: Callable[[Tensors], Step] = globals()[self.inputs]
        with tensors.device:
            return make(tensors)

    def pipe(self, transformer: Any) -> SimpleNamespace:
        """Return a pipeline of this transformer alone for `chipsparse.enable`."""
        return SimpleNamespace(
            components={"transformer": transformer},
            scheduler=None,
            do_classifier_free_guidance=self.guided,
        )


def to_fp8(transformer: Any, blocks: Sequence[str]) -> None:
    """Rounds the linears of these lists of blocks in place, weights and inputs to e4m3 by rows.

    torchao leaves out linears whose sizes are no multiples of 16.
    """
    quantization = importlib.import_module("torchao.quantization")
    # Kernels around the products are compiled as everywhere else: torchao would also tune each of
    # them, for minutes.
    config = quantization.Float8DynamicActivationFloat8WeightConfig(
        granularity=quantization.PerRow(),
        set_inductor_config=False,
    )
    for name in blocks:
        quantization.quantize_(getattr(transformer, name), config)


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
def without_useless_masks(transformer: Any) -> Iterator[None]:
    """Drops the attention masks that HunyuanVideo's blocks are given: all text tokens count here.

    Under a mask PyTorch leaves its fastest attention kernels, which is no fair baseline.
    """

    def drop(_module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, {**kwargs, "attention_mask": None}

    masked = type(transformer).__name__ == "HunyuanVideoTransformer3DModel"
    lists = ("transformer_blocks", "single_transformer_blocks") if masked else ()
    hooks = [
        block.attn.register_forward_pre_hook(drop, with_kwargs=True)
        for name in lists
        for block in getattr(transformer, name)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def places(*sizes: int) -> torch.Tensor:
    """The places of the tokens of a grid, fp32 ``[N, dimensions]``."""
    return torch.cartesian_prod(*(torch.arange(size).float() for size in sizes))


MODELS = {
    case: FullModel(case, **fields)
    for case, fields in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text()).items()
}

# The inputs of the models.


def hunyuan(tensors: Tensors) -> Step:
    """256 text tokens that all count."""
    text = tensors.text(256, "text_embed_dim")
    return tensors.call(
        "in_channels",
        *tensors.grid,
        encoder_hidden_states=text,
        encoder_attention_mask=torch.ones(text.shape[:2], dtype=tensors.dtype),
        pooled_projections=tensors.normal(1, "pooled_projection_dim"),
        guidance=torch.full((1,), 6000.0, dtype=tensors.dtype),
    )


def wan(tensors: Tensors, **others: Any) -> Step:
    """512 text tokens, which the model's cross-attention counts on."""
    text = tensors.normal(1, 512, "text_dim")
    return tensors.call("in_channels", *tensors.grid, encoder_hidden_states=text, **others)


def wan_vace(tensors: Tensors) -> Step:
    """Latents of the control beside the others."""
    control = tensors.normal(1, "vace_in_channels", *tensors.grid)
    return wan(tensors, control_hidden_states=control)


def wan_animate(tensors: Tensors) -> Step:
    """Frames behind a reference, with poses and faces."""
    frames, *size = tensors.grid
    face: list[Any] = ["motion_encoder_size"] * 2
    return wan(
        tensors,
        encoder_hidden_states_image=tensors.normal(1, 257, "image_dim"),
        pose_hidden_states=tensors.normal(1, "latent_channels", frames - 1, *size),
        face_pixel_values=tensors.normal(1, 3, 4 * frames - 7, *face),
    )


def earlier(tensors: Tensors, names: Sequence[str]) -> dict[str, Any]:
    """Numbers of frames long ago, before, just before and now; latents of all but the last."""
    frames, *size = tensors.grid
    counts = (16, 2, 2, frames)
    numbers = torch.arange(sum(counts)).split(counts)
    result = {f"indices_{name}": part for name, part in zip(names, numbers, strict=True)}
    for name, count in zip(names[:3], counts, strict=False):
        result[name] = tensors.normal(1, "in_channels", count, *size)
    return result


def helios(tensors: Tensors) -> Step:
    """A chunk of 33 frames behind earlier ones."""
    past = [f"latents_history_{length}" for length in ("long", "mid", "short")]
    others = earlier(tensors, [*past, "hidden_states"])
    numbers = {name: value[None] for name, value in others.items() if name.startswith("indices")}
    return wan(tensors, **{**others, **numbers})


def framepack(tensors: Tensors) -> Step:
    """A section of 33 frames, 256 text tokens behind a picture."""
    text = tensors.text(256, "text_embed_dim")
    names = ("latents_history_4x", "latents_history_2x", "latents_clean", "latents")
    return tensors.call(
        "in_channels",
        *tensors.grid,
        encoder_hidden_states=text,
        encoder_attention_mask=torch.ones(text.shape[:2]),
        pooled_projections=tensors.normal(1, "pooled_projection_dim"),
        image_embeds=tensors.text(729, "image_proj_dim"),
        guidance=torch.tensor([6000.0]),
        **earlier(tensors, names),
    )


def flux(tensors: Tensors) -> Step:
    """FLUX.1 with 512 tokens of text."""
    _, rows, columns = tensors.grid
    text = tensors.text(512, "joint_attention_dim")
    step = tensors.call(
        rows * columns,
        "in_channels",
        first=1,
        encoder_hidden_states=text,
        pooled_projections=tensors.normal(1, "pooled_projection_dim"),
        guidance=torch.full((1,), 3.5),
        img_ids=places(1, rows, columns).to(tensors.dtype),
        txt_ids=torch.zeros(text.shape[1], 3, dtype=tensors.dtype),
    )
    return lambda number: {**step(number), "joint_attention_kwargs": {}}  # the model takes some out


def flux3(tensors: Tensors) -> Step:
    """FLUX.3 with 512 tokens of text, and positions of four axes."""
    _, rows, columns = tensors.grid
    text = tensors.text(512, "joint_attention_dim")
    return tensors.call(
        rows * columns,
        "in_channels",
        first=1,
        encoder_hidden_states=text,
        img_ids=places(1, rows, columns, 1) / 2,
        txt_ids=places(1, 1, 1, text.shape[1]),
    )


def minimax_h3(tensors: Tensors) -> Step:
    """Videos with sound, 512 text tokens."""
    from diffusers.modular_pipelines.minimax_h3 import before_denoise as steps

    from chipsparse.pipelines.families.minimax_h3 import AUDIO_CHANNELS, audio_rows

    prompt = tensors.text(512, "text_dim")
    (frames, *size) = tensors.grid
    frames = max(7, frames)
    patch = tensors.config.patch_size
    sounds = audio_rows(frames) // AUDIO_CHANNELS
    words = prompt.shape[1]
    with torch.device("cpu"):
        *where, _, _ = steps.MiniMaxH3PrepareLayoutStep.build_packed_sequence(
            torch.full((words,), 1),
            frames,
            *size,
            sounds,
            patch,
            AUDIO_CHANNELS,
            2,
            0,  # the tags of audio and video; 1 is that of text
        )
    names = ("position_ids", "token_tags", "video_indices", "audio_indices", "text_indices")
    rows = {n: index.to(tensors.device) for n, index in zip(names, where, strict=True)}
    step = tensors.call(
        rows["video_indices"].numel(),
        tensors.config.in_channels * math.prod(patch),
        audio_hidden_states=tensors.normal(1, AUDIO_CHANNELS * sounds, "audio_in_channels"),
        encoder_hidden_states=prompt,
        **rows,
    )

    def arguments(number: int) -> dict[str, Any]:
        time = number / STEPS  # of the video; the sound is ahead of it
        with torch.device("cpu"):
            timestep, which = steps.MiniMaxH3SetTimestepsStep.build_row_timesteps(
                where[2],
                where[3],
                0,
                0,
                words,
                time,
                (1 + time) / 2,
                1.0,
                1.0,
            )
        own = {"timestep": timestep, "timestep_indices": which}
        return {**step(number), **{name: own[name].to(tensors.device) for name in own}}

    return arguments


def ltx2(tensors: Tensors) -> Step:
    """Videos with their sound, 25 tokens a second."""
    frames, rows, columns = tensors.grid
    sound = tensors.text(126, "audio_in_channels")
    return tensors.call(
        frames * rows * columns,
        "in_channels",
        num_frames=frames,
        height=rows,
        width=columns,
        audio_hidden_states=sound,
        audio_num_frames=sound.shape[1],
        encoder_hidden_states=tensors.text(1024, "caption_channels"),
        audio_encoder_hidden_states=tensors.text(1024, "caption_channels"),
    )


def z_image(tensors: Tensors) -> Step:
    """Z-Image with 256 tokens of text."""
    sizes = tensors.grid
    text = tensors.text(256, "cap_feat_dim")
    names = ("x", "t")
    return tensors.call("in_channels", *sizes, names=names, first=1, cap_feats=[*text])


def qwen_image21(tensors: Tensors) -> Step:
    """Images behind kept keys of a prompt, as all steps but the first, which makes those."""
    from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21KVCache

    grid = tensors.grid
    prompt = tensors.text(256, "context_in_dim")
    text = prompt.shape[1]
    tokens = math.prod(grid)
    kept = QwenImage21KVCache(tensors.config.num_layers)
    for layer in kept.layer_caches:
        sizes = (1, text, "num_attention_heads", "attention_head_dim")
        layer.store(tensors.normal(*sizes), tensors.normal(*sizes))
    return tensors.call(
        tokens,
        "in_channels",
        first=1,
        encoder_hidden_states=prompt,
        img_shapes=[[grid]],
        img_mask=(torch.arange(text + tokens // 4) >= text)[None],  # one for four tokens
        kv_cache=kept,
        kv_cache_mode="cached",
    )


def kandinsky(tensors: Tensors) -> Step:
    """Videos, in Kandinsky 6 with sound; latents of a picture beside the others."""
    grid = tensors.grid
    text = tensors.text(512, "in_text_dim")
    others: Any = {"text_rope_pos": torch.arange(text.shape[1])}
    if "in_audio_dim" in tensors.config:  # 43 tokens a second
        others = {"audio_hidden_states": tensors.text(218, "in_audio_dim")}
    return tensors.call(
        *grid,
        2 * tensors.config.in_visual_dim + 1,
        encoder_hidden_states=text,
        pooled_projections=tensors.normal(1, "in_text_dim2"),
        visual_rope_pos=(torch.arange(grid[0]), *(torch.arange(x // 2) for x in grid[1:])),
        **others,
    )


def hidream(tensors: Tensors) -> Step:
    """128 tokens of T5 and of each layer of Llama."""
    return tensors.call(
        "in_channels",
        *tensors.grid[1:],
        names=("hidden_states", "timesteps"),
        encoder_hidden_states_t5=tensors.text(128, 4096),
        encoder_hidden_states_llama3=tensors.text(128, 4096).expand(32, 1, -1, -1),
        pooled_embeds=tensors.normal(1, "text_emb_dim"),
    )


def cosmos3(tensors: Tensors) -> Step:
    """A video behind 512 text tokens."""
    frames, *size = tensors.grid
    shape = (frames, *(math.ceil(side / 2) for side in size))
    text = tensors.text(512, 1).shape[1]
    tokens = math.prod(shape)
    ids = places(*shape).T
    ids[0] += text + tensors.config.unified_3d_mrope_temporal_modality_margin
    prompt, video = torch.arange(text + tokens).split([text, tokens])
    return tensors.call(
        "latent_channel",
        frames,
        *size,
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
