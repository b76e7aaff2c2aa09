"""The transformers of real models at the sizes that people run, with random weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.cases import CASES
from benchmarks.random_inputs import generator_on
from benchmarks.transformer_step import DRIFT, Shape
from benchmarks.transformer_step import Inputs as FluxInputs
from benchmarks.transformer_step import make_transformer as make_flux

Call = dict[str, Any]
STEPS = 50
LEAST_BLOCKS = 2  # of a kind: see `last_blocks_only`


@dataclass(frozen=True)
class FullModel:
    """A transformer class at one size.

    Attributes:
        case: the named case with its sizes.
        transformer_class: name of the class.
        branches: guidance branches that a step calls one after the other.
        blocks: names of the model's lists of blocks.
        layers: blocks in each of these lists.
        make: the model for (blocks in each list, whether tiny, device, dtype).
        inputs: arguments of its calls for (scale, config, steps, device, dtype); a scale below 1
            is for dry runs.
    """

    case: str
    transformer_class: str
    branches: tuple[str, ...]
    blocks: tuple[str, ...]
    layers: tuple[int, ...]
    make: Callable[[tuple[int, ...], bool, torch.device, torch.dtype], Any]
    inputs: Callable[[float, Any, int, torch.device, torch.dtype], Callable[[int], Call]]

    def layers_of(self, depth: float) -> tuple[int, ...]:
        """Blocks in each list of a model with this share of them, `LEAST_BLOCKS` at least."""
        return tuple(max(LEAST_BLOCKS, round(depth * count)) for count in self.layers)


def made(kind: Callable[[], Any], device: torch.device, dtype: torch.dtype) -> Any:
    """A model with random weights, made where it runs; the same at every call."""
    before = torch.get_default_dtype()
    devices = [device] if device.type == "cuda" else []
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device), torch.random.fork_rng(devices), torch.no_grad():
            torch.manual_seed(0)
            return kind().eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(before)


def latents(
    sizes: tuple[int, ...], steps: int, device: torch.device, dtype: torch.dtype
) -> Callable[[int], torch.Tensor]:
    """Normal latents that move a little at every step."""
    generator = generator_on(device, 1)
    start, move = (
        torch.randn(sizes, generator=generator, device=device, dtype=dtype) for _ in range(2)
    )
    return lambda step: start + step * DRIFT * move


def scaled(size: int, scale: float) -> int:
    """Rows or columns of latents, even."""
    return size if scale >= 1 else max(2, int(size * scale) // 2 * 2)


def hunyuan_video(
    layers: tuple[int, ...], small: bool, device: torch.device, dtype: torch.dtype
) -> Any:
    """HunyuanVideo: 20 double and 40 single blocks, 13 billion parameters."""
    from diffusers import HunyuanVideoTransformer3DModel

    widths = {"num_attention_heads": 1, "text_embed_dim": 64, "pooled_projection_dim": 32}
    return made(
        lambda: HunyuanVideoTransformer3DModel(
            num_layers=layers[0],
            num_single_layers=layers[1],
            **(widths if small else {}),
        ),
        device,
        dtype,
    )


def hunyuan_inputs(
    scale: float, config: Any, steps: int, device: torch.device, dtype: torch.dtype
) -> Callable[[int], Call]:
    """720x1280, 129 frames, 256 text tokens that all count."""
    frames = 33 if scale >= 1 else 3
    sizes = (1, config.in_channels, frames, scaled(90, scale), scaled(160, scale))
    sample = latents(sizes, steps, device, dtype)
    generator = generator_on(device, 2)
    text = 256 if scale >= 1 else 16
    constant = {
        "encoder_hidden_states": torch.randn(
            1, text, config.text_embed_dim, generator=generator, device=device, dtype=dtype
        ),
        "encoder_attention_mask": torch.ones(1, text, device=device, dtype=dtype),
        "pooled_projections": torch.randn(
            1, config.pooled_projection_dim, generator=generator, device=device, dtype=dtype
        ),
        "guidance": torch.full((1,), 6000.0, device=device, dtype=dtype),
        "return_dict": False,
    }
    times = torch.linspace(1000, 1, steps, device=device, dtype=dtype)
    return lambda step: constant | {"hidden_states": sample(step), "timestep": times[step, None]}


def wan(
    heads: int, width: int
) -> Callable[[tuple[int, ...], bool, torch.device, torch.dtype], Any]:
    """Wan 2.1 text to video of one of its sizes."""

    def make(layers: tuple[int, ...], small: bool, device: torch.device, dtype: torch.dtype) -> Any:
        from diffusers import WanTransformer3DModel

        return made(
            lambda: WanTransformer3DModel(
                num_layers=layers[0],
                num_attention_heads=1 if small else heads,
                attention_head_dim=128,
                ffn_dim=256 if small else width,
                text_dim=64 if small else 4096,
            ),
            device,
            dtype,
        )

    return make


def wan_inputs(
    rows: int, columns: int
) -> Callable[[float, Any, int, torch.device, torch.dtype], Callable[[int], Call]]:
    """Latents of so many rows and columns, 81 frames, 512 text tokens."""

    def inputs(
        scale: float, config: Any, steps: int, device: torch.device, dtype: torch.dtype
    ) -> Callable[[int], Call]:
        frames = 21 if scale >= 1 else 3
        sizes = (1, config.in_channels, frames, scaled(rows, scale), scaled(columns, scale))
        sample = latents(sizes, steps, device, dtype)
        text = torch.randn(
            1, 512, config.text_dim, generator=generator_on(device, 2), device=device, dtype=dtype
        )
        times = torch.linspace(1000, 1, steps, device=device).long()
        return lambda step: {
            "hidden_states": sample(step),
            "timestep": times[step, None],
            "encoder_hidden_states": text,
            "return_dict": False,
        }

    return inputs


def flux(layers: tuple[int, ...], small: bool, device: torch.device, dtype: torch.dtype) -> Any:
    """FLUX.1-dev: 19 double and 38 single blocks."""
    case = CASES["flux_1280x768"]
    made = make_flux(case.scaled(heads=1) if small else case, max(layers), device, dtype)
    made.transformer_blocks = made.transformer_blocks[: layers[0]]
    made.register_to_config(num_layers=layers[0])
    return made


def flux_inputs(
    scale: float, config: Any, steps: int, device: torch.device, dtype: torch.dtype
) -> Callable[[int], Call]:
    """1280x768, 512 text tokens."""
    case = CASES["flux_1280x768"]
    shape = Shape.of(case if scale >= 1 else case.scaled(tokens=int(case.tokens * scale**2)))
    inputs = FluxInputs(shape, config, steps, device, dtype)
    return lambda step: inputs[step]


MODELS: Mapping[str, FullModel] = {
    model.case: model
    for model in (
        FullModel(
            "hunyuan_720p",
            transformer_class="HunyuanVideoTransformer3DModel",
            branches=("cond",),
            blocks=("transformer_blocks", "single_transformer_blocks"),
            layers=(20, 40),
            make=hunyuan_video,
            inputs=hunyuan_inputs,
        ),
        FullModel(
            "wan14b_720p",
            transformer_class="WanTransformer3DModel",
            branches=("cond", "uncond"),
            blocks=("blocks",),
            layers=(40,),
            make=wan(40, 13_824),
            inputs=wan_inputs(90, 160),
        ),
        FullModel(
            "wan1b_480p",
            transformer_class="WanTransformer3DModel",
            branches=("cond", "uncond"),
            blocks=("blocks",),
            layers=(30,),
            make=wan(12, 8960),
            inputs=wan_inputs(60, 104),
        ),
        FullModel(
            "flux_1280x768",
            transformer_class="FluxTransformer2DModel",
            branches=("cond",),
            blocks=("transformer_blocks", "single_transformer_blocks"),
            layers=(19, 38),
            make=flux,
            inputs=flux_inputs,
        ),
    )
}


@contextmanager
def last_blocks_only(model: FullModel, transformer: Any) -> Iterator[None]:
    """The model with two blocks of each kind: enough to compile and to tune, and no more.

    Two, since what a block gets from its like may be laid out otherwise than what the first gets.
    The last two, since caches of later layers are placed first: if any run sparse, these do.
    """
    lists = {name: getattr(transformer, name) for name in model.blocks}
    for name, blocks in lists.items():
        setattr(transformer, name, torch.nn.ModuleList(blocks[-2:]))
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
