"""Trains the tiny `AutoencoderKLWan`: 4x less in time, height and width, 8 latent channels.

    python train_vae.py --out runs/vae [--resume] [--seconds 480]

Writes the VAE in diffusers' format to OUT/vae, with the latents' mean and standard deviation in its
config; also OUT/log.csv, OUT/loss.png, OUT/reconstructions.png (pairs of rows: drawn, decoded) and
OUT/state.pt, from which --resume goes on.
"""

from __future__ import annotations

import argparse
import copy
import math
from pathlib import Path

import torch
from common import (
    Log,
    Schedule,
    contact_sheet,
    decode_latents,
    encode_moments,
    load_clips,
    loss_curve,
    to_device,
    update_average,
    use_one_pass,
)
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import WanAttentionBlock, WanResidualBlock
from drawing import draw
from muon import Muon
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


def optimizers(vae: AutoencoderKLWan, *, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the inner convolutions, AdamW at a lower rate for all else."""
    ends = (vae.encoder.conv_in, vae.decoder.conv_out, vae.quant_conv, vae.post_quant_conv)
    outer = {id(p) for module in ends for p in module.parameters()}
    params = [p for p in vae.parameters() if p.requires_grad]
    inner = [p for p in params if p.ndim >= 4 and min(p.shape[:2]) > 1 and id(p) not in outer]
    taken = {id(p) for p in inner}
    return [
        Muon(inner, lr=lr, momentum=0.9),
        torch.optim.AdamW(
            [p for p in params if id(p) not in taken],
            lr=0.5 * lr,
            betas=(0.9, 0.99),
            weight_decay=0.0,
        ),
    ]


def losses(vae: AutoencoderKLWan, video: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean absolute error, the same of differences (x, y, time), and KL per latent number."""
    mean, log_variance = encode_moments(vae, video)
    mean, log_variance = mean.float(), log_variance.float()
    latents = mean + (0.5 * log_variance).exp() * torch.randn_like(mean)
    error = decode_latents(vae, latents.to(video.dtype)).float() - video.float()
    edges = sum(error.diff(dim=dim).abs().mean() for dim in (2, 3, 4))
    kl = 0.5 * (mean.square() + log_variance.exp() - 1.0 - log_variance).mean()
    return error.abs().mean(), edges, kl


@torch.no_grad()
def finish(vae: AutoencoderKLWan, out: Path, device: torch.device, *, clips: int) -> float:
    """Sets the latents' statistics, saves OUT/vae and the sheet; returns the PSNR (dB).

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
            pairs = torch.stack([video, decoded], dim=1).flatten(0, 1)
            names = [name for caption in captions for name in (caption, "decoded")]
            contact_sheet(pairs, names, out / "reconstructions.png")
    latents = torch.cat(latents)
    fresh.register_to_config(
        latents_mean=[round(v, 5) for v in latents.mean((0, 2, 3, 4)).tolist()],
        latents_std=[round(v, 5) for v in latents.std((0, 2, 3, 4)).tolist()],
    )
    fresh.save_pretrained(out / "vae")
    print("latents: mean", fresh.config.latents_mean, "std", fresh.config.latents_std)
    return -10 * math.log10(error / (clips // 8))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", action="store_true", help="go on from OUT/state.pt")
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--seconds", type=float, default=480.0, help="all runs together")
    parser.add_argument("--pause-after", type=float, default=math.inf, help="seconds of this run")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--crop", type=int, default=64, help="pixels, in height and width")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--kl", type=float, default=1e-4, help="weight of the KL term")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--test-clips", type=int, default=128)
    parser.add_argument("--no-compile", action="store_true")
    args = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    args.out.mkdir(parents=True, exist_ok=True)

    vae = new_vae().to(device)
    init_weights(vae)
    use_one_pass(vae)
    both = optimizers(vae, lr=args.lr)
    peaks = [optimizer.param_groups[0]["lr"] for optimizer in both]
    params = [p for p in vae.parameters() if p.requires_grad]
    average = copy.deepcopy(vae).requires_grad_(False)
    step, spent = 0, 0.0
    if args.resume:
        state = torch.load(args.out / "state.pt", map_location=device)
        vae.load_state_dict(state["vae"])
        average.load_state_dict(state["average"])
        for optimizer, values in zip(both, state["optimizers"], strict=True):
            optimizer.load_state_dict(values)
        step, spent = state["step"], state["spent"]
    log = Log(args.out / "log.csv", fields=("step", "seconds", "loss", "l1", "edges", "kl"))
    schedule = Schedule(
        steps=args.steps,
        seconds=args.seconds,
        pause_after=args.pause_after,
        step=step,
        spent=spent,
    )
    clips = load_clips(seed=0, first=step * args.batch, batch=args.batch, workers=args.workers)
    averages = [
        p for p, q in zip(average.parameters(), vae.parameters(), strict=True) if q.requires_grad
    ]
    compute, paint = losses, draw
    if not args.no_compile:
        compute, paint = torch.compile(losses), torch.compile(draw)
    while schedule.running:
        staging, _ = next(clips)
        staging = to_device(staging, device)
        with torch.no_grad():
            video = crop(paint(staging), staging, size=args.crop)
        video = video.contiguous(memory_format=torch.channels_last_3d)
        with torch.autocast(device.type, torch.bfloat16):
            l1, edges, kl = compute(vae, video.bfloat16())
        loss = l1 + 0.5 * edges + args.kl * kl
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        rate = schedule.rate(warmup=50, decay_from=0.3)
        for optimizer, peak in zip(both, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * rate
            optimizer.step()
        vae.zero_grad()
        update_average(averages, [p.detach() for p in params], step=schedule.step, decay=0.998)
        schedule.advance()
        if schedule.step % 100 == 0:
            log.add(
                step=schedule.step,
                seconds=schedule.spent,
                loss=loss.item(),
                l1=l1.item(),
                edges=edges.item(),
                kl=kl.item(),
            )

    torch.save(
        {
            "vae": vae.state_dict(),
            "average": average.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in both],
            "step": schedule.step,
            "spent": schedule.spent,
        },
        args.out / "state.pt",
    )
    psnr = finish(average, args.out, device, clips=args.test_clips)
    print(f"{schedule.step} steps, {schedule.spent:.0f} s, PSNR {psnr:.2f} dB")
    loss_curve(args.out / "log.csv", args.out / "loss.png", field="loss", title="VAE loss")


if __name__ == "__main__":
    main()
