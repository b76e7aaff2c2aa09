"""Flow matching: the loss, the pool of examples it draws on, and the loop of both transformers.

x_t = (1 - sigma) x_0 + sigma noise is to give the velocity, noise - x_0. See Lipman et al., "Flow
matching for generative modeling" (2022); the noise levels follow Esser et al., "Scaling rectified
flow transformers for high-resolution image synthesis" (2024).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
import torch.nn.functional as F
from common import Batches, Log, Ranks, loss_curve
from torch import Tensor
from training import Training, add_run_arguments, muon_and_adamw

Number = TypeVar("Number", float, Tensor)
SHIFT = 3.0  # of the noise levels, in training and in the exported scheduler
LOGIT_MEAN = 1.0  # of the logit-normal half of the noise levels, before the shift


def sample_sigma(count: int, device: torch.device, *, shift: float = SHIFT) -> Tensor:
    """Noise levels in random order: half uniform, half logit-normal, shifted towards noise.

    `shift` is that of the logit-normal half.
    """
    half = count // 2 + torch.randint(2, (1,)).item() * (count % 2)
    uniform = torch.rand(half, device=device)
    normal = (torch.randn(count - half, device=device) + LOGIT_MEAN).sigmoid()
    sigma = torch.cat([shift_sigma(uniform), shift_sigma(normal, shift)])
    return sigma[torch.randperm(count, device=device)]


def shift_sigma(u: Number, shift: float = SHIFT) -> Number:
    """Noise levels in [0, 1], moved towards 1."""
    return shift * u / (1.0 + (shift - 1.0) * u)


def flow_loss(
    predict: Callable[[Tensor, Tensor], Tensor],
    latents: Tensor,
    *,
    levels: Callable[[int, torch.device], Tensor] = sample_sigma,
    expected: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Tensor:
    """Mean squared error of the predicted velocity.

    Args:
        predict: gives it from noisy latents, float32 (B, ...), and their noise levels (B,)
        latents: (B, ...), without noise
        levels: gives so many noise levels
        expected: gives, from noise (B, ...) and its levels (B,), what the velocity is to lead to
            in place of `latents`
    """
    sigma = levels(len(latents), latents.device)
    noise = torch.randn(latents.shape, device=latents.device)
    level = sigma.view(-1, *[1] * (latents.ndim - 1))
    velocity = predict((1.0 - level) * latents.float() + level * noise, sigma)
    clean = latents.float() if expected is None else expected(noise, sigma)
    return F.mse_loss(velocity.float(), noise - clean)


class Pool:
    """The latest examples, in columns, in GPU memory; new ones replace the oldest.

    Args:
        capacity: examples at most, a multiple of the size of a batch that is added
        encode: from a batch of staging arrays and its captions to the rows of all columns
    """

    def __init__(
        self,
        *,
        capacity: int,
        encode: Callable[[dict[str, Tensor], list[str]], list[Tensor]],
    ) -> None:
        self.capacity, self.encode = capacity, encode
        self.columns: list[Tensor] = []
        self.added = 0

    def add(self, staging: dict[str, Tensor], captions: list[str]) -> None:
        """Encodes a batch of examples into the pool."""
        rows = self.encode(staging, captions)
        if not self.columns:
            self.columns = [row.new_empty(self.capacity, *row.shape[1:]) for row in rows]
        at = self.added % self.capacity
        for column, row in zip(self.columns, rows, strict=True):
            column[at : at + len(row)] = row
        self.added += len(captions)

    def batch(self, size: int) -> list[Tensor]:
        """Rows of random examples, (`size`, ...) from every column."""
        filled = min(self.added, self.capacity)
        picked = torch.randint(filled, (size,), device=self.columns[0].device)
        return [column[picked] for column in self.columns]


def new_parser(
    doc: str, *, noun: str, seconds: float, pool: int, lr: float, decay_from: float
) -> argparse.ArgumentParser:
    """The arguments of both transformers' scripts; examples are called `noun`."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--vae", type=Path, required=True, help="folder of the trained VAE")
    add_run_arguments(parser, steps=100_000, seconds=seconds)
    parser.add_argument("--start", type=Path, help="folder with weights to begin a new run from")
    parser.add_argument("--seed", type=int, default=2, help=f"of the {noun}")
    parser.add_argument("--batch", type=int, default=64, help=f"{noun} per step and GPU")
    parser.add_argument("--fresh", type=int, default=16, help=f"new {noun} per step")
    parser.add_argument("--pool", type=int, default=pool, help=f"{noun} kept at most")
    first = f"{noun} to begin with"
    parser.add_argument(f"--first-{noun}", type=int, default=8_192, dest="first", help=first)
    parser.add_argument("--lr", type=float, default=lr)
    parser.add_argument("--decay-from", type=float, default=decay_from, help="share at peak rate")
    parser.add_argument("--ema", type=float, default=0.999)
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--no-compile", action="store_true")
    return parser


def prepare(args: argparse.Namespace) -> Ranks:
    """Makes OUT, seeds the weights, and joins the processes that train together."""
    ranks = Ranks()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    return ranks


def new_training(
    model: torch.nn.Module,
    matrices: list[Tensor],
    args: argparse.Namespace,
    ranks: Ranks,
    *,
    warmup: int = 200,
) -> Training:
    """Muon for `matrices`, AdamW for all else; seeds what is random from here on, per rank."""
    optimizers = muon_and_adamw(
        matrices,
        list(model.parameters()),
        lr=args.lr,
        adamw_lr=args.lr,
        weight_decay=0.01,
        fused=ranks.device.type == "cuda",
    )
    training = Training(
        model,
        optimizers,
        args,
        warmup=warmup,
        decay_from=args.decay_from,
        ema=args.ema,
        ranks=ranks,
    )
    torch.manual_seed(training.step + (ranks.rank << 32))
    return training


def example_range(args: argparse.Namespace, training: Training) -> dict[str, int]:
    """Which examples `load_examples` is to load: each rank its own, and those after a resume."""
    return {
        "seed": args.seed + 1000 * training.ranks.rank,
        "first": training.step * args.fresh + (args.first if training.step else 0),
        "batch": args.fresh,
        "workers": args.workers,
    }


def train(
    training: Training,
    pool: Pool,
    examples: Batches,
    step_loss: Callable[..., tuple[Tensor, bool]],
    args: argparse.Namespace,
) -> bool:
    """Trains to the end of the schedule, and writes state.pt, log.csv and loss.webp.

    Args:
        step_loss: from the step's number and a batch's columns to the loss and whether the log's
            mean is to count it

    Returns whether this process is the one that goes on: all ranks hold the same weights.
    """
    ranks = training.ranks
    while pool.added < args.first:
        pool.add(*next(examples))
    log = Log(args.out / f"log{ranks.rank or ''}.csv", fields=("step", "seconds", "lr", "loss"))
    schedule, recent = training.schedule, []
    schedule.start_clock()
    while schedule.running:
        pool.add(*next(examples))
        loss, counts = step_loss(training.step, *pool.batch(args.batch))
        rate = training.update(loss)
        if counts:
            recent.append(loss.detach())
        if training.step % 100 == 0:
            mean = torch.stack(recent).mean().item()
            log.add(step=training.step, seconds=schedule.spent, lr=rate, loss=mean)
            recent = []

    ranks.close()
    if ranks.rank > 0:
        return False
    seen = training.step * args.batch * ranks.count
    print(f"{training.step} steps, {schedule.spent:.0f} s, {seen} examples", flush=True)
    training.save(args.out)
    loss_curve(log.path, args.out / "loss.webp", field="loss", title="Flow-matching loss")
    return True
