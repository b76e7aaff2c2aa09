"""Trains a smaller VAE that reads and writes the latents of the tiny Flux's first one.

    python train_small_flux_vae.py --vae runs/flux_vae/vae --out runs/flux_small_vae [--resume]

The transformer was trained on the first VAE's latents, so the encoder learns to give them, and the
decoder to draw from them. Writes the VAE in diffusers' format to OUT/vae (float32); also
OUT/log.csv, OUT/loss.webp, OUT/reconstructions.webp (drawn and decoded side by side) and
OUT/state.pt, from which --resume goes on. Prints, over stills held out, how far its latents are
from the first VAE's, and the PSNR of both, each from its own latents and from the other's.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path

import torch
import vae_training
from common import encode_moments, save_sheet, still_sheet, to_device, to_images
from diffusers import AutoencoderKL
from flux_common import load_stills
from still_scenes import draw_still
from torch import Tensor
from train_flux_vae import new_vae

CHANNELS = (32, 48, 48)  # of the first VAE: 32, 64, 128
WEIGHTS = {"l1": 1.0, "edges": 0.5, "latents": 1.0, "log_variance": 0.01}


def losses(vae: AutoencoderKL, pictures: Tensor, *, first: AutoencoderKL) -> dict[str, Tensor]:
    """Those of decoding the latents of the `first` VAE, and how far the own ones are from them."""
    with torch.no_grad():
        mean, log_variance = (part.float() for part in encode_moments(first, pictures))
    own_mean, own_log_variance = (part.float() for part in encode_moments(vae, pictures))
    return {
        **vae_training.decoding_losses(vae, mean, log_variance, pictures),
        "latents": (own_mean - mean).square().mean(),
        "log_variance": (own_log_variance - log_variance).square().mean(),
    }


@torch.no_grad()
def finish(
    vae: AutoencoderKL, first: AutoencoderKL, out: Path, device: torch.device, *, count: int
) -> float:
    """Saves OUT/vae and the sheet and prints how both do; returns the squared error.

    Goes the way of the pipelines: `encode` and `decode` in float32 over held-out images. The error
    is that of images decoded from the first VAE's latents, which are what the transformer makes.
    """
    vae.eval().save_pretrained(out / "vae")
    models = {"first": first, "small": vae}
    errors = {(a, b): 0.0 for a in models for b in models}
    off = 0.0
    data = load_stills(seed=1, first=0, batch=8, workers=0)
    for number in range(count // 8):
        staging, captions = next(data)
        images = draw_still(to_device(staging, device))
        latents = {name: model.encode(images).latent_dist.mode() for name, model in models.items()}
        off += (latents["small"] - latents["first"]).square().mean().item()
        for encoder, decoder in errors:
            decoded = models[decoder].decode(latents[encoder]).sample
            error = (decoded - images).square().mean().item() / 4  # of values in [0, 1]
            errors[encoder, decoder] += error / (count // 8)
            if number == 0 and (encoder, decoder) == ("first", "small"):
                pairs = torch.stack([images, decoded], dim=1).flatten(0, 1)
                names = [name for caption in captions for name in (caption, "decoded")]
                save_sheet(still_sheet(to_images(pairs), names), out / "reconstructions.webp")
    print(f"latents are {math.sqrt(off / (count // 8)):.4f} standard deviations off (r.m.s.)")
    for (encoder, decoder), error in errors.items():
        print(f"{encoder} encoder, {decoder} decoder: {-10 * math.log10(error):.2f} dB")
    return errors["first", "small"]


def main() -> None:
    parser = vae_training.new_parser(__doc__, steps=100_000, seconds=150.0, batch=16, workers=12)
    parser.add_argument("--vae", type=Path, required=True, help="the first VAE")
    parser.add_argument("--channels", type=int, nargs=3, default=CHANNELS)
    parser.add_argument("--test-images", type=int, default=128)
    args = parser.parse_args()
    ranks = vae_training.prepare(args)
    first = AutoencoderKL.from_pretrained(args.vae).eval().requires_grad_(False)
    first = first.to(ranks.device, memory_format=torch.channels_last)
    vae = new_vae(channels=args.channels).to(ranks.device, memory_format=torch.channels_last)
    paint = draw_still if args.no_compile else torch.compile(draw_still)

    def pictures(staging: dict[str, Tensor]) -> Tensor:
        images = paint(to_device(staging, ranks.device))
        return images.contiguous(memory_format=torch.channels_last)

    training = vae_training.train(
        vae,
        functools.partial(load_stills, seed=0),
        pictures,
        args,
        ranks,
        losses=functools.partial(losses, first=first),
        weights=WEIGHTS,
    )
    error = finish(training.average, first, args.out, ranks.device, count=args.test_images)
    vae_training.report(training, error, args)


if __name__ == "__main__":
    main()
