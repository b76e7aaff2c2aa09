"""Trains tiny-wan's transformer further, on clips of several sizes, so that one set draws them all.

    torchrun --nproc-per-node 4 -- train_sizes.py --start ../tiny-wan --out runs/sizes \
        --canvas 128x33:64:3 --canvas 256x65:8:8 --canvas 384x97:2:10:0.3

A canvas is SIDExFRAMES:BATCH:WEIGHT[:FROM]: the pixels of its side, the frames of a clip, clips per
step and GPU, how often it is taken next to the others, and the share of the training before which
it is not. A larger canvas shows the same scenes, larger and slower; since more pixels tell what a
noisy clip shows, half of its noise levels are shifted further, as its side is longer. All GPUs take
the same canvas at a step. Text encoder and VAE are those of --start and stay as they are. Only
clips of the first canvas come with text of all lengths and, one step in sixteen, as single frames.

Writes to OUT what `train_transformer.py` writes, with a log and a curve for each canvas.
"""

from __future__ import annotations

import argparse
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from common import Batches, Log, Ranks, load_clips, loss_curve
from flow_matching import SHIFT, Pool, new_training, prepare
from scenes import PAIRS, SIZE
from text import new_tokenizer, tokenize
from torch import Tensor
from train_transformer import (
    Denoiser,
    Encoder,
    clip_loss,
    load_parts,
    save_parts,
    step_loss,
)
from training import Training, add_run_arguments
from transformers import PreTrainedTokenizerFast

TEXT_LENGTH = 64
FRESH = 4  # a step draws a clip for every so many of its batch
FIRST = 32  # steps' batches in a pool at the start
MOST = 512  # batches of new clips in it at most


@dataclass(frozen=True)
class Canvas:
    """A size of clips, clips per step and GPU, how often it is taken, and from when."""

    side: int
    frames: int
    batch: int
    weight: float
    start: float = 0.0

    @property
    def name(self) -> str:
        """As in 256x65."""
        return f"{self.side}x{self.frames}"

    @property
    def shift(self) -> float:
        """Of the noise levels."""
        return SHIFT * self.side / SIZE

    @classmethod
    def parse(cls, text: str) -> Canvas:
        """Reads SIDExFRAMES:BATCH:WEIGHT[:FROM]."""
        found = re.fullmatch(r"(\d+)x(\d+):(\d+):([\d.]+)(?::([\d.]+))?", text)
        if not found:
            raise argparse.ArgumentTypeError(f"SIDExFRAMES:BATCH:WEIGHT[:FROM], got {text}")
        side, frames, batch, weight, start = found.groups()
        return cls(int(side), int(frames), int(batch), float(weight), float(start or 0))


class Clips:
    """A canvas's clips: drawn by workers, encoded here, kept in a pool.

    After so many `steps` of an earlier run they are others than that one drew.
    """

    def __init__(
        self,
        canvas: Canvas,
        tokenizer: PreTrainedTokenizerFast,
        args: argparse.Namespace,
        ranks: Ranks,
        *,
        steps: int,
    ) -> None:
        self.canvas = canvas
        encoder = Encoder(args.start / "vae", ranks.device, compile_=False, side=canvas.side)

        def encode(staging: dict[str, Tensor], captions: list[str]) -> list[Tensor]:
            return [encoder(staging), tokenize(tokenizer, captions).to(ranks.device)]

        fresh, first = max(1, canvas.batch // FRESH), FIRST * canvas.batch
        self.pool = Pool(capacity=MOST * fresh, encode=encode)
        self.examples: Batches = load_clips(
            seed=args.seed + 1000 * ranks.rank + canvas.side,
            first=first + steps * fresh if steps else 0,
            batch=fresh,
            workers=args.workers,
            frames=canvas.frames,
            pairs=args.pairs,
        )
        while self.pool.added < first:
            self.pool.add(*next(self.examples))

    def batch(self) -> list[Tensor]:
        """Latents and token ids of a step, some of them new."""
        self.pool.add(*next(self.examples))
        return self.pool.batch(self.canvas.batch)


def choose(clips: list[Clips], *, step: int, progress: float) -> Clips:
    """The canvas of a step, the same on all GPUs."""
    ready = [each for each in clips if progress >= each.canvas.start]
    weights = [each.canvas.weight for each in ready]
    return random.Random(step).choices(ready, weights)[0]


def train(
    training: Training,
    clips: list[Clips],
    loss_of: Callable[[Canvas, Tensor, Tensor], tuple[Tensor, bool]],
    args: argparse.Namespace,
) -> bool:
    """Trains to the end of the schedule; returns whether this process is the one that goes on.

    Args:
        loss_of: from a canvas, latents and token ids of clips to the loss, and whether the log's
            mean is to count it
    """
    ranks, schedule = training.ranks, training.schedule
    recent: dict[Clips, list[Tensor]] = {each: [] for each in clips}
    schedule.start_clock()
    while schedule.running:
        taken = choose(clips, step=training.step, progress=schedule.progress)
        loss, counts = loss_of(taken.canvas, *taken.batch())
        rate = training.update(loss)
        if counts:
            recent[taken].append(loss.detach())
        if training.step % 50 == 0:
            if ranks.rank == 0:
                report(recent, args.out, step=training.step, seconds=schedule.spent, lr=rate)
            recent = {each: [] for each in clips}
    ranks.close()
    if ranks.rank > 0:
        return False
    training.save(args.out)
    for each in clips:
        name = each.canvas.name
        log, title = log_of(args.out, name), f"Flow-matching loss, {name}"
        if log.exists():
            loss_curve(log, args.out / f"loss_{name}.webp", field="loss", title=title)
    return True


class FlowLoss:
    """Flow matching; the first canvas has text of all lengths, and single frames now and then."""

    def __init__(self, training: Training, first: Canvas) -> None:
        self.training, self.first = training, first
        self.lengths = random.Random(training.step)

    def __call__(self, canvas: Canvas, latents: Tensor, ids: Tensor) -> tuple[Tensor, bool]:
        """The loss of clips, and whether it counts."""
        model, step = self.training.model, self.training.step
        if canvas == self.first:
            return step_loss(model, self.lengths, step, latents, ids)
        without = int(step % 4 == 0) if len(ids) < 8 else len(ids) // 8
        shift = canvas.shift
        return clip_loss(model, latents, ids, TEXT_LENGTH, without=without, shift=shift), True


def report(recent: dict[Clips, list[Tensor]], out: Path, **facts: float) -> None:
    """Writes the mean loss of every canvas that was taken."""
    for clips, losses in recent.items():
        log = Log(log_of(out, clips.canvas.name), fields=("step", "seconds", "lr", "loss"))
        if losses:
            log.add(loss=torch.stack(losses).mean().item(), **facts)


def log_of(out: Path, name: str) -> Path:
    """A canvas's log."""
    return out / f"log_{name}.csv"


def new_parser(doc: str, *, lr: float) -> argparse.ArgumentParser:
    """The arguments of training further, on canvases."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    add_run_arguments(parser, steps=100_000, seconds=430.0)
    parser.add_argument("--start", type=Path, required=True, help="a pipeline folder")
    parser.add_argument("--canvas", type=Canvas.parse, action="append", required=True)
    parser.add_argument("--seed", type=int, default=7, help="of the clips")
    parser.add_argument("--pairs", type=float, default=PAIRS, help="share with two objects")
    parser.add_argument("--lr", type=float, default=lr)
    parser.add_argument("--warmup", type=int, default=30, help="steps to the peak rate")
    parser.add_argument("--decay-from", type=float, default=0.4, help="share at peak rate")
    parser.add_argument("--ema", type=float, default=0.99)
    parser.add_argument("--workers", type=int, default=3, help="for each canvas")
    parser.add_argument("--no-compile", action="store_true")
    return parser


def parse_arguments(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The arguments, of which one canvas has to be there from the start."""
    args = parser.parse_args()
    if all(canvas.start > 0 for canvas in args.canvas):
        parser.error("--canvas: one of them has to be there from the start")
    return args


def begin(args: argparse.Namespace) -> tuple[Training, list[Clips]]:
    """The weights of --start, to be trained but for the text encoder's, and the clips."""
    began = time.monotonic()
    ranks = prepare(args)
    # cuDNN's attention, the fastest at these lengths, runs where the others are off.
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    tokenizer = new_tokenizer()
    model = Denoiser(tokenizer).to(ranks.device)
    load_parts(model, args.start)
    model.text_encoder.requires_grad_(False)
    matrices = [p for p in model.transformer.blocks.parameters() if p.ndim == 2]
    training = new_training(model, matrices, args, ranks, warmup=args.warmup)
    clips = [Clips(canvas, tokenizer, args, ranks, steps=training.step) for canvas in args.canvas]
    print(f"{time.monotonic() - began:.0f} s until the first step", flush=True)
    if not args.no_compile:
        model.transformer.compile_repeated_blocks(dynamic=True)
    return training, clips


def main() -> None:
    args = parse_arguments(new_parser(__doc__, lr=1e-3))
    training, clips = begin(args)
    if train(training, clips, FlowLoss(training, args.canvas[0]), args):
        save_parts(training.average, args.out)


if __name__ == "__main__":
    main()
