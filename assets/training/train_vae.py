"""Trains the tiny `AutoencoderKLWan`: 4x less in time, height and width, 8 latent channels.

    python train_vae.py --out runs/vae [--resume] [--seconds 480]

Writes the VAE in diffusers' format to OUT/vae, with the latents' mean and standard deviation in its
config; also OUT/log.csv, OUT/loss.webp, OUT/reconstructions.webp (pairs of rows: drawn, decoded)
and OUT/state.pt, from which --resume goes on.
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch
import vae_training
from common import clip_sheet, load_clips, save_sheet, to_device, use_one_pass
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import WanAttentionBlock, WanResidualBlock
from drawing import draw
from torch import Tensor, nn

Z_DIM = 8


def new_vae() -> AutoencoderKLWan:
    """The VAE with fresh weights."""
    return AutoencoderKLWan(
        base_dim=16,
        decoder_base_dim=24,
        z_dim=Z_DIM,
        dim_mult=[1, 2, 4],
        num_res_blocks=1,
        temperal_downsample=[True, True],
        latents_mean=[0.0] * Z_DIM,
        latents_std=[1.0] * Z_DIM,
        scale_factor_temporal=4,
        scale_factor_spatial=4,
    )


def init_weights(vae: AutoencoderKLWan) -> None:
    """Keeps the signal's size through the many convolutions; turns the attention off for good.

    Without the attention of its middle blocks (their output layers stay zero) the VAE looks only at
    neighbourhoods, so that training on crops serves videos of any size.
    """
    for module in vae.modules():
        if isinstance(module, nn.Conv2d | nn.Conv3d):
            nn.init.normal_(module.weight, std=module.weight[0].numel() ** -0.5)
            nn.init.zeros_(module.bias)
    for module in vae.modules():
        if isinstance(module, WanResidualBlock):
            module.conv2.weight.data.mul_(0.1)
        elif isinstance(module, WanAttentionBlock):
            nn.init.zeros_(module.proj.weight)
            module.requires_grad_(False)
    vae.quant_conv.weight.data[Z_DIM:] *= 0.1
    vae.quant_conv.bias.data[Z_DIM:] = -4.0  # log variances


def crop(video: Tensor, staging: dict[str, Tensor], *, size: int) -> Tensor:
    """Windows (B, 3, F, size, size) through which an object comes; drawn with `staging`."""
    path = staging["path"]  # (B, O, F, 4)
    clips = torch.arange(len(video), device=video.device)
    frame = torch.randint(path.shape[2], clips.shape, device=video.device)
    present = (staging["shape"] >= 0).sum(1)
    obj = (torch.rand(len(video), device=video.device) * present).long()
    centre = path[clips, obj, frame, :2] + size * (
        torch.rand(len(video), 2, device=video.device) - 0.5
    )
    corner = (centre - size / 2).long().clamp(0, video.shape[-1] - size)
    axis = torch.arange(size, device=video.device)
    columns, rows = (corner[:, i, None] + axis for i in (0, 1))
    window = video[clips[:, None, None], :, :, rows[:, :, None], columns[:, None, :]]
    return window.permute(0, 3, 4, 1, 2)  # from (B, size, size, 3, F)


@torch.no_grad()
def finish(vae: AutoencoderKLWan, out: Path, device: torch.device, *, clips: int) -> float:
    """Sets the latents' statistics, saves OUT/vae and the sheet; returns the squared error.

    Goes the way of the pipelines: `encode` and `decode` in float32 over whole held-out clips.
    """
    fresh = new_vae().to(device).eval()
    fresh.load_state_dict(vae.state_dict())
    error, latents = 0.0, []
    data = load_clips(seed=1, first=0, batch=8, workers=0)
    for number in range(clips // 8):
        staging, captions = next(data)
        video = draw(to_device(staging, device))
        latents.append(fresh.encode(video).latent_dist.mode())
        decoded = fresh.decode(latents[-1]).sample
        error += (decoded - video).square().mean().item() / 4  # of values in [0, 1]
        if number == 0:
            pairs = torch.stack([video, decoded], dim=1)[:4].flatten(0, 1)
            names = [name for caption in captions[:4] for name in (caption, "decoded")]
            save_sheet(clip_sheet(pairs, names), out / "reconstructions.webp")
    latents = torch.cat(latents)
    fresh.register_to_config(
        latents_mean=[round(v, 5) for v in latents.mean((0, 2, 3, 4)).tolist()],
        latents_std=[round(v, 5) for v in latents.std((0, 2, 3, 4)).tolist()],
    )
    fresh.save_pretrained(out / "vae")
    print("latents: mean", fresh.config.latents_mean, "std", fresh.config.latents_std)
    return error / (clips // 8)


def main() -> None:
    parser = vae_training.new_parser(__doc__, steps=20_000, seconds=480.0, batch=8, workers=8)
    parser.add_argument("--crop", type=int, default=64, help="pixels, in height and width")
    parser.add_argument("--test-clips", type=int, default=128)
    args = parser.parse_args()
    ranks = vae_training.prepare(args)
    vae = new_vae().to(ranks.device)
    init_weights(vae)
    use_one_pass(vae)
    paint = draw if args.no_compile else torch.compile(draw)

    def pictures(staging: dict[str, Tensor]) -> Tensor:
        staging = to_device(staging, ranks.device)
        video = crop(paint(staging), staging, size=args.crop).bfloat16()
        return video.contiguous(memory_format=torch.channels_last_3d)

    load = functools.partial(load_clips, seed=0)
    training = vae_training.train(vae, load, pictures, args, ranks)
    error = finish(training.average, args.out, ranks.device, clips=args.test_clips)
    vae_training.report(training, error, args)


if __name__ == "__main__":
    main()
