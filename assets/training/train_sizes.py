"""Trains tiny-wan's transformer further, on clips of several sizes, so that one set draws them all.

    torchrun --nproc-per-node 4 -- train_sizes.py --start ../tiny-wan --out runs/sizes \
        --canvas 128x33:64:3 --canvas 256x65:8:8 --canvas 384x97/8:8:4 --canvas 384x97:2:5

A canvas is SIDExFRAMES[/SEEN]:BATCH:WEIGHT[:FROM[:TO]]: the pixels of its side, the frames of a
clip, clips per step and GPU, how often it is taken next to the others, and the shares of the
training before and behind which it is not. A larger canvas shows the same scenes, larger and
slower; since more pixels tell what a noisy clip shows, half of its noise levels are shifted
further, as its side is longer. What stands where, and how many, is decided above a level that is
higher, too (`Canvas.layout_from`): two thirds of the clips of a larger canvas are shown above it.
Where side and frames are whole numbers of times those of 128x33, --teacher says what is to be
expected of the layout (`layout_teacher.py`), and at 128x33 itself what its weights would draw.
All GPUs take the same canvas at a step. Text encoder and VAE are those of --start and stay as they
are. Only clips of the first canvas come with text of all lengths and, one step in sixteen, as
single frames.

SEEN is how many of a clip's latent frames a step shows the transformer, a run of them or any, each
with the rotary embedding of its place in the whole clip. A third of them takes a seventh of the
time of long clips, and what is learned of looks holds for the whole; training on part of the tokens
is from Zheng et al., "Fast training of diffusion models with masked transformers" (2023). The
layout shows later in part of a clip than in all of it, so parts are shown below its level alone; a
run that showed parts above it, too, drew objects twice.

Writes to OUT what `train_transformer.py` writes, with a log and a curve for each canvas.
"""

from __future__ import annotations

import argparse
import copy
import functools
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from common import Batches, Log, Ranks, load_clips, loss_curve
from flow_matching import SHIFT, Pool, new_training, prepare, sample_sigma, shift_sigma
from layout_teacher import LayoutTeacher
from scenes import FRAMES, PAIRS, SIZE
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
FRESH = 4  # a step draws a clip for every so many of its batch, of which it sees all frames
FIRST = 96  # clips in a pool at the start
MOST = 4096  # in it at most
LAYOUT_SHARE = 2 / 3  # of the whole clips of a larger canvas that are shown above `layout_from`
# Of clip to noise, where the layout of one of SIZE and FRAMES is decided.
LAYOUT_RATIO = 0.3


@dataclass(frozen=True)
class Canvas:
    """A size of clips, clips per step and GPU, how often it is taken, and from when to when.

    Attributes:
        seen: so many latent frames of a clip are shown at a step; None: all.
        start, end: shares of the training.
    """

    side: int
    frames: int
    batch: int
    weight: float
    start: float = 0.0
    end: float = 1.0
    seen: int | None = None

    @property
    def size(self) -> tuple[int, int]:
        """Pixels and frames."""
        return self.side, self.frames

    @property
    def name(self) -> str:
        """As in 256x65, or 256x65_8 of eight latent frames."""
        part = "" if self.seen is None else f"_{self.seen}"
        return f"{self.side}x{self.frames}{part}"

    @property
    def shift(self) -> float:
        """Of the noise levels."""
        return SHIFT * self.side / SIZE

    @property
    def latent_frames(self) -> int:
        """Of a whole clip."""
        return (self.frames - 1) // 4 + 1

    @property
    def times(self) -> tuple[int, int] | None:
        """Whole numbers of times SIZE and, after the first, FRAMES; None: they are not."""
        space, time = self.side // SIZE, (self.frames - 1) // (FRAMES - 1)
        whole = self.size == (space * SIZE, time * (FRAMES - 1) + 1) and time > 0
        return (space, time) if whole else None

    @property
    def share_seen(self) -> float:
        """Of a clip, at a step."""
        return 1.0 if self.seen is None else self.seen / self.latent_frames

    @property
    def finer(self) -> float:
        """How much less noise the same part of the picture has than one of SIZE and FRAMES."""
        return (self.side / SIZE) * (self.frames / FRAMES) ** 0.5

    @property
    def layout_from(self) -> float:
        """The noise level above which a whole clip's layout is open.

        There clip and noise are as `LAYOUT_RATIO` to one in a clip of SIZE and FRAMES; in one of
        more pixels, in which noise averages out, as much less as the square root of their number.
        """
        return self.finer / (self.finer + LAYOUT_RATIO)

    def levels(self, count: int, device: torch.device) -> Tensor:
        """Noise levels (count,) of a step: see the text of this file."""
        if self.seen is not None:
            some = sample_sigma(64 * count, device, shift=self.shift)
            return some[some < self.layout_from][:count]
        usual = sample_sigma(count, device, shift=self.shift)
        if self.finer <= 1.0:
            return usual
        least = shift_sigma(self.layout_from, 1.0 / self.shift)  # where shifting it gives that
        high = shift_sigma(least + (1.0 - least) * torch.rand(count, device=device), self.shift)
        return torch.where(torch.rand(count, device=device) < LAYOUT_SHARE, high, usual)

    @classmethod
    def parse(cls, text: str) -> Canvas:
        """Reads SIDExFRAMES[/SEEN]:BATCH:WEIGHT[:FROM[:TO]]."""
        number = r"([\d.]+)"
        found = re.fullmatch(
            rf"(\d+)x(\d+)(?:/(\d+))?:(\d+):{number}(?::{number}(?::{number})?)?", text
        )
        if not found:
            form = "SIDExFRAMES[/SEEN]:BATCH:WEIGHT[:FROM[:TO]]"
            raise argparse.ArgumentTypeError(f"{form}, got {text}")
        side, frames, seen, batch, weight, start, end = found.groups()
        canvas = cls(
            int(side),
            int(frames),
            int(batch),
            float(weight),
            float(start or 0),
            float(end or 1),
            int(seen) if seen else None,
        )
        if canvas.seen is not None and not 0 < canvas.seen <= canvas.latent_frames:
            raise argparse.ArgumentTypeError(
                f"a clip of {frames} frames has {canvas.latent_frames} latent ones, got {text}"
            )
        return canvas


class Clips:
    """Clips of one size: drawn by workers, encoded here, kept in a pool for its canvases.

    Args:
        canvas: the one of this size with most clips a step
        steps: of an earlier run, which drew other clips than this one will
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
        vae, times = args.start / "vae", canvas.times
        encoder = Encoder(vae, ranks.device, compile_=False, side=canvas.side)
        has_small = times not in (None, (1, 1))
        small = Encoder(vae, ranks.device, compile_=False) if has_small else None

        def encode(staging: dict[str, Tensor], captions: list[str]) -> list[Tensor]:
            rows = [encoder(staging), tokenize(tokenizer, captions).to(ranks.device)]
            if small is not None:
                rows.append(small({**staging, "path": staging["path"][:, :, :: times[1]]}))
            return rows

        self.fresh = max(1, canvas.batch // FRESH)  # drawn at a time
        self.owed = 0.0  # clips that are to be drawn
        self.pool = Pool(capacity=MOST - MOST % self.fresh, encode=encode)
        self.examples: Batches = load_clips(
            seed=args.seed + 1000 * ranks.rank + canvas.side,
            first=FIRST + steps * self.fresh if steps else 0,
            batch=self.fresh,
            workers=args.workers,
            frames=canvas.frames,
            pairs=args.pairs,
        )
        while self.pool.added < FIRST:
            self.pool.add(*next(self.examples))

    def batch(self, canvas: Canvas) -> list[Tensor]:
        """Latents and token ids of a step of a canvas, some of them new.

        Of one with `times` above one, latents of the same clips in small, too.
        """
        self.owed += canvas.batch * canvas.share_seen / FRESH
        while self.owed >= self.fresh:
            self.pool.add(*next(self.examples))
            self.owed -= self.fresh
        return self.pool.batch(canvas.batch)


def choose(canvases: Sequence[Canvas], *, step: int, progress: float) -> Canvas:
    """The canvas of a step, the same on all GPUs."""
    ready = [each for each in canvases if each.start <= progress < each.end]
    weights = [each.weight for each in ready]
    return random.Random(step).choices(ready, weights)[0]


def train(
    training: Training,
    clips: dict[tuple[int, int], Clips],
    loss_of: Callable[..., tuple[Tensor, bool]],
    args: argparse.Namespace,
) -> bool:
    """Trains to the end of the schedule; returns whether this process is the one that goes on.

    Args:
        clips: by size
        loss_of: from a canvas and what `Clips.batch` gives to the loss, and whether the log's mean
            is to count it
    """
    ranks, schedule = training.ranks, training.schedule
    recent: dict[str, list[Tensor]] = {each.name: [] for each in args.canvas}
    schedule.start_clock()
    while schedule.running:
        taken = choose(args.canvas, step=training.step, progress=schedule.progress)
        loss, counts = loss_of(taken, *clips[taken.size].batch(taken))
        rate = training.update(loss)
        if counts:
            recent[taken.name].append(loss.detach())
        if training.step % 50 == 0:
            if ranks.rank == 0:
                report(recent, args.out, step=training.step, seconds=schedule.spent, lr=rate)
            recent = {name: [] for name in recent}
    ranks.close()
    if ranks.rank > 0:
        return False
    training.save(args.out)
    for name in recent:
        log, title = log_of(args.out, name), f"Flow-matching loss, {name}"
        if log.exists():
            loss_curve(log, args.out / f"loss_{name}.webp", field="loss", title=title)
    return True


class FlowLoss:
    """Flow matching; the first canvas has text of all lengths, and single frames now and then."""

    def __init__(self, training: Training, first: Canvas, teacher: Denoiser) -> None:
        self.training, self.first = training, first
        self.teacher = LayoutTeacher(functools.partial(teacher, text_length=TEXT_LENGTH))
        self.lengths = random.Random(training.step)

    def __call__(
        self, canvas: Canvas, latents: Tensor, ids: Tensor, *small: Tensor
    ) -> tuple[Tensor, bool]:
        """The loss of clips, and whether it counts."""
        model, step = self.training.model, self.training.step
        expected = None
        if canvas.times is not None and canvas.seen is None:
            of_small = small[0] if small else latents
            expected = functools.partial(self.teacher.expected, latents, of_small, ids)
        if canvas == self.first:
            return step_loss(model, self.lengths, step, latents, ids, expected=expected)
        without = len(ids) // 8 or int(step % (8 // len(ids)) == 0)  # of an eighth of the clips
        options = {"without": without, "levels": canvas.levels, "expected": expected}
        with some_frames(model, canvas) as frames:
            latents = latents if frames is None else latents[:, :, frames]
            loss = clip_loss(model, latents, ids, TEXT_LENGTH, **options)
        return loss, True


@contextmanager
def some_frames(model: Denoiser, canvas: Canvas) -> Iterator[Tensor | None]:
    """Latent frames that a step of a canvas shows, which keep their places; None: all of them.

    Half of the steps show a run of them, the others any, int64 (seen,).
    """
    if canvas.seen is None:
        yield None
        return
    count, seen = canvas.latent_frames, canvas.seen
    if torch.rand(()) < 0.5:
        frames = torch.randint(count - seen + 1, ()) + torch.arange(seen)
    else:
        frames = torch.randperm(count)[:seen].sort().values
    rope = model.transformer.rope
    rotations = rope.forward

    def of_frames(latents: Tensor) -> tuple[Tensor, ...]:
        whole = latents.new_empty(()).expand(1, 1, count, *latents.shape[3:])
        turns = [each.unflatten(1, (count, -1)) for each in rotations(whole)]
        return tuple(each[:, frames].flatten(1, 2) for each in turns)

    rope.forward = of_frames
    try:
        yield frames
    finally:
        del rope.forward  # the instance's; that of its class is there again


def report(recent: dict[str, list[Tensor]], out: Path, **facts: float) -> None:
    """Writes the mean loss of every canvas that was taken."""
    for name, losses in recent.items():
        log = Log(log_of(out, name), fields=("step", "seconds", "lr", "loss"))
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
    parser.add_argument("--teacher", type=Path, help="a pipeline folder; default: --start")
    parser.add_argument("--canvas", type=Canvas.parse, action="append", required=True)
    parser.add_argument("--seed", type=int, default=7, help="of the clips")
    parser.add_argument("--pairs", type=float, default=PAIRS, help="share with two objects")
    parser.add_argument("--lr", type=float, default=lr)
    parser.add_argument("--warmup", type=int, default=30, help="steps to the peak rate")
    parser.add_argument("--decay-from", type=float, default=0.4, help="share at peak rate")
    parser.add_argument("--ema", type=float, default=0.99)
    parser.add_argument("--workers", type=int, default=3, help="for each size")
    parser.add_argument("--no-compile", action="store_true")
    return parser


def parse_arguments(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The arguments; at all times there has to be a canvas."""
    args = parser.parse_args()
    bounds = {0.0} | {bound for each in args.canvas for bound in (each.start, each.end)}
    for bound in sorted(bounds):
        if bound < 1.0 and not any(each.start <= bound < each.end for each in args.canvas):
            parser.error(f"--canvas: none of them is there from {bound:g} of the training on")
    return args


def begin(
    args: argparse.Namespace,
) -> tuple[Training, dict[tuple[int, int], Clips], Denoiser]:
    """The weights of --start, to be trained but for the text encoder; clips by size; a teacher."""
    began = time.monotonic()
    ranks = prepare(args)
    # cuDNN's attention, the fastest at these lengths, runs where the others are off.
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    tokenizer = new_tokenizer()
    model = Denoiser(tokenizer).to(ranks.device)
    teacher = copy.deepcopy(model).requires_grad_(False)
    load_parts(model, args.start)
    load_parts(teacher, args.teacher or args.start)
    model.text_encoder.requires_grad_(False)
    matrices = [p for p in model.transformer.blocks.parameters() if p.ndim == 2]
    training = new_training(model, matrices, args, ranks, warmup=args.warmup)
    clips: dict[tuple[int, int], Clips] = {}
    for canvas in sorted(args.canvas, key=lambda canvas: -canvas.batch):
        if canvas.size not in clips:
            clips[canvas.size] = Clips(canvas, tokenizer, args, ranks, steps=training.step)
    print(f"{time.monotonic() - began:.0f} s until the first step", flush=True)
    if not args.no_compile:
        model.transformer.compile_repeated_blocks(dynamic=True)
    return training, clips, teacher


def main() -> None:
    args = parse_arguments(new_parser(__doc__, lr=1e-3))
    training, clips, teacher = begin(args)
    if train(training, clips, FlowLoss(training, args.canvas[0], teacher), args):
        save_parts(training.average, args.out)


if __name__ == "__main__":
    main()
