"""Trains the tiny Flux's `AutoencoderKL`: 4x less in height and width, 8 latent channels.

    python train_flux_vae.py --out runs/flux_vae [--resume] [--seconds 120]

Writes the VAE in diffusers' format to OUT/vae (float32), with latents of mean 0 and standard
deviation 1 in every channel; also OUT/log.csv, OUT/loss.webp, OUT/reconstructions.webp (drawn and
decoded side by side) and OUT/state.pt, from which --resume goes on. Prints the PSNR over stills
held out.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import torch
import vae_training
from common import save_sheet, still_sheet, to_device, to_images
from diffusers import AutoencoderKL
from flux_common import load_stills
from still_scenes import SIDE, draw_still
from torch import Tensor

LATENT_CHANNELS = 8


def new_vae(*, channels: Sequence[int] = (32, 64, 128)) -> AutoencoderKL:
    """The VAE with fresh weights, so many channels wide at full, half and quarter size.

    It has no attention in its middle, so that its cost grows with the image's area only.
    """
    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=tuple(channels),
        layers_per_block=1,
        latent_channels=LATENT_CHANNELS,
        norm_num_groups=8,
        sample_size=SIDE,
        scaling_factor=1.0,
        shift_factor=0.0,
        force_upcast=False,
        mid_block_add_attention=False,
    )
    vae.quant_conv.weight.data[LATENT_CHANNELS:] *= 0.1
    vae.quant_conv.bias.data[LATENT_CHANNELS:] = -4.0  # log variances
    return vae


@torch.no_grad()
def standardise(vae: AutoencoderKL, latents: Tensor) -> None:
    """Gives every channel of such `latents` (B, C, h, w) mean 0 and standard deviation 1.

    The config of `AutoencoderKL` has one scale for all channels, so the two 1x1 convolutions next
    to the latents take it over; what the decoder's inner layers see stays the same.
    """
    mean, std = latents.mean((0, 2, 3)), latents.std((0, 2, 3))
    before, after = vae.quant_conv, vae.post_quant_conv
    after.bias += after.weight[:, :, 0, 0] @ mean
    after.weight *= std[None, :, None, None]
    before.bias[:LATENT_CHANNELS] = (before.bias[:LATENT_CHANNELS] - mean) / std
    before.weight[:LATENT_CHANNELS] /= std[:, None, None, None]
    before.bias[LATENT_CHANNELS:] -= 2.0 * std.log()


@torch.no_grad()
def finish(vae: AutoencoderKL, out: Path, device: torch.device, *, count: int) -> float:
    """Standardises the latents, saves OUT/vae and the sheet; returns the squared error.

    Goes the way of the pipelines: `encode` and `decode` in float32 over held-out images.
    """
    vae.eval()
    data = load_stills(seed=1, first=0, batch=8, workers=0)
    batches = [next(data) for _ in range(count // 8)]
    images = [draw_still(to_device(staging, device)) for staging, _ in batches]
    standardise(vae, torch.cat([vae.encode(part).latent_dist.mode() for part in images]))
    vae.save_pretrained(out / "vae")

    error, latents = 0.0, []
    for number, (part, (_, captions)) in enumerate(zip(images, batches, strict=True)):
        latents.append(vae.encode(part).latent_dist.mode())
        decoded = vae.decode(latents[-1]).sample
        error += (decoded - part).square().mean().item() / 4  # of values in [0, 1]
        if number == 0:
            pairs = torch.stack([part, decoded], dim=1).flatten(0, 1)
            names = [name for caption in captions for name in (caption, "decoded")]
            save_sheet(still_sheet(to_images(pairs), names), out / "reconstructions.webp")
    values = torch.cat(latents)
    print("latents: mean", values.mean((0, 2, 3)).tolist(), "std", values.std((0, 2, 3)).tolist())
    return error / len(images)


def main() -> None:
    parser = vae_training.new_parser(__doc__, steps=100_000, seconds=120.0, batch=16, workers=12)
    parser.add_argument("--test-images", type=int, default=128)
    args = parser.parse_args()
    ranks = vae_training.prepare(args)
    vae = new_vae().to(ranks.device, memory_format=torch.channels_last)
    paint = draw_still if args.no_compile else torch.compile(draw_still)

    def pictures(staging: dict[str, Tensor]) -> Tensor:
        images = paint(to_device(staging, ranks.device))
        return images.contiguous(memory_format=torch.channels_last)

    load = functools.partial(load_stills, seed=0)
    training = vae_training.train(vae, load, pictures, args, ranks)
    error = finish(training.average, args.out, ranks.device, count=args.test_images)
    vae_training.report(training, error, args)


if __name__ == "__main__":
    main()
