"""Trains a smaller encoder to give the latents of a Wan VAE's own; the decoder stays as it is.

    python train_wan_encoder.py --vae runs/vae/vae --out runs/encoder [--resume] [--seconds 90]

Generation only decodes, so the encoder, which training and image inputs need, may be small. Writes
the VAE with its new encoder to OUT/vae, and OUT/log.csv, OUT/loss.webp and OUT/state.pt, from which
--resume goes on. Prints how far the latents of held-out clips are from the old ones, and the PSNR
of these clips decoded from both. Runs on a CPU too, in half an hour.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from common import Log, Ranks, encode_moments, load_clips, loss_curve, to_device, use_one_pass
from diffusers import AutoencoderKLWan
from drawing import draw
from torch import Tensor
from train_vae import crop, init_weights
from training import Training, add_run_arguments
from vae_training import optimizers

FRAMES = 17  # of a training example; the encoder looks back at fewer
BASE_DIM = 8


def with_small_encoder(vae: AutoencoderKLWan, *, base_dim: int) -> AutoencoderKLWan:
    """A copy of `vae` whose encoder is fresh, `base_dim` channels wide at full size.

    Of its parameters only the encoder's take gradients: `quant_conv`, too, is the old one.
    """
    config = {name: value for name, value in vae.config.items() if not name.startswith("_")}
    # the decoder is as wide as the encoder unless set otherwise
    config["decoder_base_dim"] = config["decoder_base_dim"] or config["base_dim"]
    small = AutoencoderKLWan(**{**config, "base_dim": base_dim})
    init_weights(small)
    for part in ("quant_conv", "post_quant_conv", "decoder"):
        getattr(small, part).load_state_dict(getattr(vae, part).state_dict())
        getattr(small, part).requires_grad_(False)
    return small


def latents_std(vae: AutoencoderKLWan) -> Tensor:
    """Standard deviations of the latents' channels, (z, 1, 1, 1)."""
    return torch.tensor(vae.config.latents_std).view(-1, 1, 1, 1)


@torch.no_grad()
def evaluate(
    old: AutoencoderKLWan, new: AutoencoderKLWan, device: torch.device, *, clips: int
) -> None:
    """Prints how both do on held-out clips, through `encode` and `decode` as in the pipelines."""
    old, new, std = old.to(device), new.to(device), latents_std(old).to(device)
    data = load_clips(seed=1, first=0, batch=1, workers=0)
    difference, errors = 0.0, {"old": 0.0, "new": 0.0}
    for _ in range(clips):
        video = draw(to_device(next(data)[0], device))
        latents = {}
        for name, vae in (("old", old), ("new", new)):
            latents[name] = vae.encode(video).latent_dist.mode()
            decoded = old.decode(latents[name]).sample
            errors[name] += (decoded - video).square().mean().item() / 4  # of values in [0, 1]
        difference += ((latents["new"] - latents["old"]) / std).square().mean().item()
    psnr = {name: -10 * math.log10(error / clips) for name, error in errors.items()}
    off = math.sqrt(difference / clips)
    print(f"latents are {off:.4f} standard deviations off (root mean square)")
    print(f"PSNR of decoded clips: {psnr['old']:.2f} dB before, {psnr['new']:.2f} dB now")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_run_arguments(parser, steps=20_000, seconds=90.0)
    parser.add_argument("--vae", type=Path, required=True)
    parser.add_argument("--base-dim", type=int, default=BASE_DIM)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--crop", type=int, default=64, help="pixels, in height and width")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--test-clips", type=int, default=16)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    ranks = Ranks()

    def load_old() -> AutoencoderKLWan:
        return AutoencoderKLWan.from_pretrained(args.vae).eval().requires_grad_(False)

    old = load_old()
    small = with_small_encoder(old, base_dim=args.base_dim)
    for vae in (old, small):
        use_one_pass(vae.to(ranks.device))
    std = latents_std(old).to(ranks.device)
    training = Training(
        small,
        optimizers(small.encoder, [small.encoder.conv_in, small.encoder.conv_out], lr=args.lr),
        args,
        warmup=30,
        decay_from=0.3,
        ema=0.99,
        ranks=ranks,
    )
    if training.step:
        torch.manual_seed(training.step)  # other crops than the first steps had
    log = Log(args.out / "log.csv", fields=("step", "seconds", "loss", "mean", "log_variance"))
    first = training.step * args.batch
    examples = load_clips(seed=0, first=first, batch=args.batch, workers=args.workers)
    while training.schedule.running:
        staging = to_device(next(examples)[0], ranks.device)
        with torch.no_grad():
            video = crop(draw(staging, frames=slice(FRAMES)), staging, size=args.crop)
            video = video.contiguous(memory_format=torch.channels_last_3d)  # twice as fast on CPUs
            mean, log_variance = encode_moments(old, video)
        own_mean, own_log_variance = encode_moments(small, video)
        off = ((own_mean - mean) / std).square().mean()
        off_variance = (own_log_variance - log_variance).square().mean()
        loss = off + 0.01 * off_variance
        training.update(loss)
        if training.step % 20 == 0:
            values = {"loss": loss, "mean": off, "log_variance": off_variance}
            log.add(
                step=training.step,
                seconds=training.schedule.spent,
                **{name: value.item() for name, value in values.items()},
            )
    training.save(args.out)
    # the one-pass way is of the modules, so what is saved and measured is a fresh VAE
    result = with_small_encoder(old, base_dim=args.base_dim).eval()
    result.load_state_dict(training.average.state_dict())
    result.save_pretrained(args.out / "vae")
    evaluate(load_old(), result, ranks.device, clips=args.test_clips)
    loss_curve(log.path, args.out / "loss.webp", field="loss", title="Encoder loss")


if __name__ == "__main__":
    main()
