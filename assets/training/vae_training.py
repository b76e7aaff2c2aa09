"""What the scripts of the VAEs share: their arguments, optimizers, losses and loop."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

import torch
from common import Batches, Log, Ranks, decode_latents, encode_moments, loss_curve
from diffusers import AutoencoderKL, AutoencoderKLWan
from torch import Tensor, nn
from training import Training, add_run_arguments, muon_and_adamw

VAE = AutoencoderKL | AutoencoderKLWan
Losses = Callable[[VAE, Tensor], dict[str, Tensor]]  # of the VAE and pictures, by name

AUTOENCODING = {"l1": 1.0, "edges": 0.5, "kl": 1e-4}  # weights of the losses


def new_parser(
    doc: str, *, steps: int, seconds: float, batch: int, workers: int
) -> argparse.ArgumentParser:
    """The arguments of all the scripts."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    add_run_arguments(parser, steps=steps, seconds=seconds)
    parser.add_argument("--batch", type=int, default=batch)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--workers", type=int, default=workers)
    parser.add_argument("--no-compile", action="store_true")
    return parser


def prepare(args: argparse.Namespace) -> Ranks:
    """Makes OUT and seeds all that is random."""
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    args.out.mkdir(parents=True, exist_ok=True)
    return Ranks()


def optimizers(
    model: nn.Module, ends: list[nn.Module], *, lr: float
) -> list[torch.optim.Optimizer]:
    """Muon for the convolutions, AdamW at half its rate for those at the `ends` and all else."""
    outer = {id(p) for module in ends for p in module.parameters()}
    params = [p for p in model.parameters() if p.requires_grad]
    inner = [p for p in params if p.ndim >= 4 and min(p.shape[:2]) > 1 and id(p) not in outer]
    return muon_and_adamw(inner, params, lr=lr, adamw_lr=0.5 * lr, momentum=0.9)


def decoding_losses(
    vae: VAE, mean: Tensor, log_variance: Tensor, pictures: Tensor
) -> dict[str, Tensor]:
    """Mean absolute error of what a sample of the latents decodes to, and of its edges.

    Edges are differences along each axis; `pictures` are images (B, 3, H, W) or videos
    (B, 3, F, H, W), the moments of their latents float32.
    """
    latents = mean + (0.5 * log_variance).exp() * torch.randn_like(mean)
    error = decode_latents(vae, latents.to(pictures.dtype)).float() - pictures.float()
    edges = sum(error.diff(dim=dim).abs().mean() for dim in range(2, error.ndim))
    return {"l1": error.abs().mean(), "edges": edges}


def autoencoding_losses(vae: VAE, pictures: Tensor) -> dict[str, Tensor]:
    """`decoding_losses` of the VAE's own latents, and their KL per number."""
    mean, log_variance = (part.float() for part in encode_moments(vae, pictures))
    kl = 0.5 * (mean.square() + log_variance.exp() - 1.0 - log_variance).mean()
    return {**decoding_losses(vae, mean, log_variance, pictures), "kl": kl}


def train(
    vae: VAE,
    load: Callable[..., Batches],
    pictures: Callable[[dict[str, Tensor]], Tensor],
    args: argparse.Namespace,
    ranks: Ranks,
    *,
    losses: Losses = autoencoding_losses,
    weights: dict[str, float] = AUTOENCODING,
) -> Training:
    """Trains to the end of the schedule, and writes state.pt and log.csv.

    Args:
        load: gives the training's examples from number `first` on, by `batch` and `workers`
        pictures: draws a batch of staging arrays as the VAE is to see them
        losses: what is to become small
        weights: how much each of these counts, by name
    """
    ends = [vae.encoder.conv_in, vae.decoder.conv_out, vae.quant_conv, vae.post_quant_conv]
    training = Training(
        vae,
        optimizers(vae, ends, lr=args.lr),
        args,
        warmup=50,
        decay_from=0.3,
        ema=0.998,
        ranks=ranks,
    )
    if training.step:
        torch.manual_seed(training.step)  # other noise than the first steps had
    log = Log(args.out / "log.csv", fields=("step", "seconds", "loss", *weights))
    examples = load(first=training.step * args.batch, batch=args.batch, workers=args.workers)
    compute = losses if args.no_compile else torch.compile(losses)
    while training.schedule.running:
        staging, _ = next(examples)
        with torch.no_grad():
            seen = pictures(staging)
        with torch.autocast(ranks.device.type, torch.bfloat16):
            parts = compute(vae, seen)
        loss = sum(weight * parts[name] for name, weight in weights.items())
        training.update(loss)
        if training.step % 100 == 0:
            values = {name: value.item() for name, value in {"loss": loss, **parts}.items()}
            log.add(step=training.step, seconds=training.schedule.spent, **values)
    training.save(args.out)
    return training


def report(training: Training, squared_error: float, args: argparse.Namespace) -> None:
    """Prints the PSNR of values in [0, 1] with this mean squared error; writes loss.webp."""
    psnr = -10 * math.log10(squared_error)
    print(f"{training.step} steps, {training.schedule.spent:.0f} s, PSNR {psnr:.2f} dB")
    loss_curve(args.out / "log.csv", args.out / "loss.webp", field="loss", title="VAE loss")
