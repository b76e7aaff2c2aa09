"""The model of moving photographs: linear latents, a stock `WanPipeline` over them, checkpoints.

A checkpoint is a folder: ``facts.json``, and the weights in files of at most 15 MB. Matrices are
int8 with a scale for each row, everything else is float32; all of it is compressed.
"""

from __future__ import annotations

import json
import math
import shutil
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    ConfigMixin,
    FlowMatchEulerDiscreteScheduler,
    ModelMixin,
    WanPipeline,
    WanTransformer3DModel,
)
from diffusers.configuration_utils import register_to_config
from safetensors.torch import load, save

from benchmarks.moving_photographs.clips import TEXT_DIM, Captions

CHANNELS = 32
BLOCK = (4, 8, 8)  # frames and pixels of a latent
VALUES = 3 * math.prod(BLOCK)
TRANSFORMER = {
    "patch_size": (1, 2, 2),
    "in_channels": CHANNELS,
    "out_channels": CHANNELS,
    "text_dim": TEXT_DIM,
    "cross_attn_norm": True,
    "qk_norm": "rms_norm_across_heads",
    "num_attention_heads": 4,
    "attention_head_dim": 128,
    "ffn_dim": 2048,
    "num_layers": 12,
}
TINY = {"num_attention_heads": 2, "attention_head_dim": 32, "ffn_dim": 128, "num_layers": 3}
# Steps of a row's root mean square in int8: 6.6 bits a weight when compressed.
FINENESS = 24
LEAST_ROUNDED = 4096  # elements; smaller tensors stay float32
PART_BYTES = 16_000_000


class LinearLatents(ModelMixin, ConfigMixin):
    """The principal components of blocks of pixels, in place of a VAE.

    Latents have unit variance. As those of a causal VAE, the first of them shows one frame.
    """

    @register_to_config
    def __init__(
        self,
        z_dim: int = CHANNELS,
        scale_factor_temporal: int = BLOCK[0],
        scale_factor_spatial: int = BLOCK[1],
        latents_mean: tuple[float, ...] = (0.0,) * CHANNELS,
        latents_std: tuple[float, ...] = (1.0,) * CHANNELS,
    ) -> None:
        super().__init__()
        self.register_buffer("basis", torch.zeros(VALUES, z_dim))
        self.register_buffer("mean", torch.zeros(VALUES))
        self.register_buffer("deviation", torch.ones(z_dim))

    def fit(self, blocks: torch.Tensor) -> float:
        """Takes the components of ``blocks [N, VALUES]``; returns the PSNR of what they keep."""
        values = blocks.double()
        centred = values - values.mean(0)
        variances, vectors = torch.linalg.eigh(centred.T @ centred / len(values))
        kept = self.deviation.numel()
        self.basis.copy_(vectors[:, -kept:].flip(-1))
        self.mean.copy_(values.mean(0))
        self.deviation.copy_(variances[-kept:].flip(0).clamp_min(1e-8).sqrt())
        lost = variances[:-kept].clamp_min(1e-12).sum() / VALUES
        return float(10 * torch.log10(4 / lost))  # pixels are -1 to 1

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        """``[3, 4 t, 8 h, 8 w]`` to ``[z_dim, t, h, w]``."""
        latents = (blocks_of(pixels) - self.mean) @ self.basis / self.deviation
        return latents.permute(3, 0, 1, 2)

    def decode(self, latents: torch.Tensor, return_dict: bool = False) -> tuple[torch.Tensor]:
        """``[B, z_dim, t, h, w]`` to ``[B, 3, 4 t - 3, 8 h, 8 w]``."""
        values = latents.permute(0, 2, 3, 4, 1) * self.deviation @ self.basis.T + self.mean
        batch, time, height, width = values.shape[:4]
        parts = values.view(batch, time, height, width, 3, *BLOCK).permute(0, 4, 1, 5, 2, 6, 3, 7)
        shape = (batch, 3, time * BLOCK[0], height * BLOCK[1], width * BLOCK[2])
        return (parts.reshape(shape)[:, :, BLOCK[0] - 1 :],)


def blocks_of(pixels: torch.Tensor) -> torch.Tensor:
    """``[3, 4 t, 8 h, 8 w]`` to ``[t, h, w, VALUES]``."""
    t, h, w = (length // block for length, block in zip(pixels.shape[1:], BLOCK, strict=True))
    parts = pixels.view(3, t, BLOCK[0], h, BLOCK[1], w, BLOCK[2]).permute(1, 3, 5, 0, 2, 4, 6)
    return parts.reshape(t, h, w, VALUES)


class PhotographsPipeline(WanPipeline):
    """A `WanPipeline` whose prompts are captions of scenes."""

    def _get_t5_prompt_embeds(
        self,
        prompt: str | list[str],
        num_videos_per_prompt: int = 1,
        max_sequence_length: int = 0,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        captions = Captions()
        texts = [prompt] if isinstance(prompt, str) else prompt
        vectors = torch.stack([captions(text) for text in texts])
        repeated = vectors.repeat_interleave(num_videos_per_prompt, 0)
        return repeated.to(device or self._execution_device, dtype or self.transformer.dtype)


@dataclass
class Model:
    """What a checkpoint holds.

    Attributes:
        transformer: float32.
        facts: JSON values: ``transformer``, the fields of its config besides `TRANSFORMER`'s;
            ``photographs``, how many captions may name; ``steps``, ``guidance`` and ``shift`` of
            generations; and how it was trained.
    """

    transformer: WanTransformer3DModel
    latents: LinearLatents
    facts: dict[str, Any]

    @classmethod
    def new(cls, facts: Mapping[str, Any]) -> Model:
        """An untrained one; its transformer gives zeros at first."""
        transformer = WanTransformer3DModel(**{**TRANSFORMER, **facts["transformer"]})
        for block in transformer.blocks:
            for linear in (block.attn1.to_out[0], block.attn2.to_out[0], block.ffn.net[2]):
                torch.nn.init.zeros_(linear.weight)
        torch.nn.init.zeros_(transformer.proj_out.weight)
        return cls(transformer, LinearLatents(), dict(facts))

    def pipeline(self, dtype: torch.dtype, device: torch.device) -> PhotographsPipeline:
        """The pipeline; its transformer is this one, cast as diffusers casts what it loads."""
        full = self.transformer._keep_in_fp32_modules
        for name, weights in self.transformer.named_parameters():
            if not any(part in name.split(".") for part in full):
                weights.data = weights.data.to(dtype)
        pipe = PhotographsPipeline(
            tokenizer=None,
            text_encoder=None,
            vae=self.latents,
            scheduler=FlowMatchEulerDiscreteScheduler(shift=self.facts["shift"]),
            transformer=self.transformer.eval().requires_grad_(False),
        )
        pipe.set_progress_bar_config(disable=True)
        return pipe.to(device)


def write_checkpoint(model: Model, folder: Path) -> int:
    """Writes a checkpoint in place of the one that is there; returns its bytes."""
    named = {
        **{
            f"transformer.{name}": tensor for name, tensor in model.transformer.state_dict().items()
        },
        **{f"latents.{name}": tensor for name, tensor in model.latents.state_dict().items()},
    }
    content = {}
    for name, tensor in named.items():
        whole = tensor.detach().float().cpu().contiguous()
        if name.startswith("latents.") or whole.ndim < 2 or whole.numel() < LEAST_ROUNDED:
            content[name] = whole
            continue
        rows = whole.flatten(1)
        scale = rows.square().mean(1).sqrt() / FINENESS
        scale = torch.maximum(scale, rows.abs().amax(1) / 127).clamp_min(1e-12)
        content[f"{name}:scale"] = scale
        content[f"{name}:int8"] = (whole / _like_rows(scale, whole)).round().to(torch.int8)
    # Huffman's code alone: there is nothing to repeat in weights.
    packer = zlib.compressobj(9, strategy=zlib.Z_HUFFMAN_ONLY)
    packed = packer.compress(save(content)) + packer.flush()
    half = folder.with_name(f"{folder.name}.new")
    shutil.rmtree(half, ignore_errors=True)
    half.mkdir(parents=True)
    for number, start in enumerate(range(0, len(packed), PART_BYTES)):
        (half / f"weights-{number:02d}.bin").write_bytes(packed[start : start + PART_BYTES])
    (half / "facts.json").write_text(json.dumps(model.facts, indent=1) + "\n", encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    half.rename(folder)
    return len(packed)


def read_checkpoint(folder: Path) -> Model:
    """The model of a checkpoint, on the CPU."""
    facts = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
    packed = b"".join(file.read_bytes() for file in sorted(folder.glob("weights-*.bin")))
    content = load(zlib.decompress(packed))
    model = Model.new(facts)
    for part, module in (("transformer", model.transformer), ("latents", model.latents)):
        state = {}
        for name in module.state_dict():
            stored = f"{part}.{name}"
            if stored not in content:
                rounded = content[f"{stored}:int8"].float()
                content[stored] = rounded * _like_rows(content[f"{stored}:scale"], rounded)
            state[name] = content[stored]
        module.load_state_dict(state)
    return model


def _like_rows(scale: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """A factor for each row of a tensor, with its number of dimensions."""
    return scale.view(-1, *[1] * (tensor.ndim - 1))
