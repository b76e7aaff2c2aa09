"""Trains the tiny `FluxTransformer2DModel` by flow matching, with finished text encoders and VAE.

    python train_flux.py --vae runs/flux_vae/vae --text runs/flux_text --out runs/flux
        [--resume] [--seconds 500] [--pause-after 250]

With `torchrun --nproc-per-node 4 -- train_flux.py ...` four GPUs train on stills of their own.

Stills are drawn and encoded while training goes on and kept in a pool of packed latents in GPU
memory. A step takes a batch from the pool (`flow_matching.py`), at timesteps sigma. One caption in
eight gives way to "", for classifier-free guidance. The text's length varies, because nothing hides
the padding from the transformer.

Writes to OUT: state.pt (everything, for --resume), transformer/ (the weights' moving average,
float16), log.csv and loss.webp. `export.py` makes the pipeline folder, `sample.py` draws with it.
"""

from __future__ import annotations

import argparse
import functools
import math
import random
from pathlib import Path

import torch
import torch.nn.functional as F
from common import to_device
from diffusers import AutoencoderKL, FluxPipeline, FluxTransformer2DModel
from flow_matching import (
    Pool,
    example_range,
    flow_loss,
    new_parser,
    new_training,
    prepare,
    train,
)
from flux_common import (
    attention_without_cudnn,
    load_stills,
)
from flux_text import CAPTION_DIM, MAX_WORDS, WORD_DIM, TextEncoders
from still_scenes import draw_still
from torch import Tensor

OTHER_LENGTHS = (128, 512)  # tokens of text, in every eighth batch


def new_transformer() -> FluxTransformer2DModel:
    """The transformer with fresh weights; every block begins as the identity."""
    transformer = FluxTransformer2DModel(
        in_channels=32,
        num_layers=2,
        num_single_layers=8,
        attention_head_dim=64,
        num_attention_heads=4,
        joint_attention_dim=WORD_DIM,
        pooled_projection_dim=CAPTION_DIM,
        guidance_embeds=False,
        axes_dims_rope=(8, 28, 28),
    )
    for name, module in transformer.named_modules():
        if is_modulation(name):
            torch.nn.init.zeros_(module.weight)
            torch.nn.init.zeros_(module.bias)
    torch.nn.init.zeros_(transformer.proj_out.weight)
    return transformer


def is_modulation(name: str) -> bool:
    """Whether the layer of this name makes scales, shifts and gates of the time and the caption."""
    return name.endswith(
        (".norm.linear", ".norm1.linear", ".norm1_context.linear", "norm_out.linear")
    )


class Encoder:
    """The trained VAE's encoder: staged stills to packed latents."""

    def __init__(self, vae: AutoencoderKL, device: torch.device, *, compile_: bool) -> None:
        self.vae, self.device = vae, device
        self.run = torch.compile(self._encode) if compile_ else self._encode

    def _encode(self, staging: dict[str, Tensor]) -> Tensor:
        images = draw_still(staging).contiguous(memory_format=torch.channels_last)
        return self.vae.quant_conv(self.vae.encoder(images)).chunk(2, dim=1)[0]

    @torch.no_grad()
    def __call__(self, staging: dict[str, Tensor]) -> Tensor:
        """Latents (B, 1024, 32), bfloat16, packed as `FluxPipeline` does."""
        with torch.autocast(self.device.type, torch.bfloat16):
            latents = self.run(to_device(staging, self.device)).bfloat16().contiguous()
        return FluxPipeline._pack_latents(latents, *latents.shape)


class TextReader:
    """Embeds token ids as `FluxPipeline` does; the last eighth of a batch counts as ""."""

    def __init__(self, encoders: TextEncoders, device: torch.device) -> None:
        self.encoders = encoders.to(device)
        self.empty = [ids.to(device) for ids in encoders.tokenize([""])]
        self.pad = encoders.t5_tokenizer.pad_token_id

    @torch.no_grad()
    def __call__(self, clip_ids: Tensor, t5_ids: Tensor, *, words: int) -> tuple[Tensor, Tensor]:
        """The captions' vectors (B, CAPTION_DIM) and their words' (B, words, WORD_DIM)."""
        drop = len(t5_ids) // 8
        clip_ids[len(clip_ids) - drop :] = self.empty[0]
        t5_ids[len(t5_ids) - drop :] = self.empty[1]
        t5_ids = F.pad(t5_ids, (0, words - t5_ids.shape[1]), value=self.pad)
        return self.encoders(clip_ids, t5_ids)


def step_loss(
    transformer: FluxTransformer2DModel,
    read: TextReader,
    lengths: random.Random,
    step: int,
    latents: Tensor,
    clip_ids: Tensor,
    t5_ids: Tensor,
) -> tuple[Tensor, bool]:
    """The loss of a step, from calls as `FluxPipeline` makes them; the log counts all steps."""
    words = lengths.choice(OTHER_LENGTHS) if step % 8 == 7 else MAX_WORDS
    pooled, hidden = read(clip_ids, t5_ids, words=words)
    batch, tokens, _ = latents.shape
    side = math.isqrt(tokens)
    device = latents.device

    def predict(noisy: Tensor, sigma: Tensor) -> Tensor:
        return transformer(
            hidden_states=noisy,
            timestep=sigma,
            guidance=None,
            pooled_projections=pooled,
            encoder_hidden_states=hidden,
            txt_ids=torch.zeros(words, 3, device=device),
            img_ids=FluxPipeline._prepare_latent_image_ids(
                batch, side, side, device, torch.float32
            ),
            joint_attention_kwargs={},
            return_dict=False,
        )[0]

    with attention_without_cudnn(), torch.autocast(device.type, torch.bfloat16):
        return flow_loss(predict, latents), True


def matrices(transformer: FluxTransformer2DModel) -> list[Tensor]:
    """Those of the blocks but their modulations, for Muon."""
    return [
        p
        for name, p in transformer.named_parameters()
        if p.ndim == 2
        and name.startswith(("transformer_blocks.", "single_transformer_blocks."))
        and not is_modulation(name.removesuffix(".weight"))
    ]


def compile_blocks(transformer: FluxTransformer2DModel) -> None:
    """Compiles the blocks once for each length of the text, with fixed shapes.

    A length takes three graphs: double blocks, the first single block, and the other single
    blocks, which get slices of a longer sequence.
    """
    torch._dynamo.config.recompile_limit = 4 * (1 + len(OTHER_LENGTHS))
    transformer.compile_repeated_blocks(dynamic=False)


def parse_arguments() -> argparse.Namespace:
    parser = new_parser(
        __doc__,
        noun="stills",
        seconds=500.0,
        pool=131_072,
        lr=2e-3,
        decay_from=0.4,
    )
    parser.add_argument("--text", type=Path, required=True, help="folder of the text encoders")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    ranks = prepare(args)
    device = ranks.device
    transformer = new_transformer().to(device)
    if args.start and not args.resume:
        started = FluxTransformer2DModel.from_pretrained(args.start).float()
        transformer.load_state_dict(started.state_dict())
    training = new_training(transformer, matrices(transformer), args, ranks)

    vae = AutoencoderKL.from_pretrained(args.vae).to(device).eval().requires_grad_(False)
    encoders = TextEncoders.load(args.text)
    read = TextReader(encoders, device)
    encoder = Encoder(vae, device, compile_=not args.no_compile)

    def encode(staging: dict[str, Tensor], captions: list[str]) -> list[Tensor]:
        ids = [i.to(device, non_blocking=True) for i in encoders.tokenize(captions)]
        return [encoder(staging), *ids]

    pool = Pool(capacity=args.pool, encode=encode)
    stills = load_stills(**example_range(args, training))
    if not args.no_compile:
        compile_blocks(transformer)
    loss = functools.partial(step_loss, transformer, read, random.Random(training.step))
    if train(training, pool, stills, loss, args):
        average = training.average.half()
        average.save_pretrained(args.out / "transformer", max_shard_size="15MB")


if __name__ == "__main__":
    main()
