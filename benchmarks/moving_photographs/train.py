"""``torchrun --nproc-per-node G -m benchmarks.moving_photographs.train``: trains the model.

A call runs for ``--limit`` seconds and leaves its state and a checkpoint in ``--out``; the next one
goes on from the state, or from the averaged weights of a checkpoint (``--checkpoint``) where there
is no state. ``--seconds`` is all of the training, which decides the canvases and the learning rate.
``--distil N`` makes a student of N steps of the model in ``--teacher``: it learns, at the noise
levels of its own steps, the mean velocity of the teacher's steps between them, guidance included.
"""

from __future__ import annotations

import argparse
import copy
import math
import os
import random
import sys
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor

from benchmarks.moving_photographs.clips import Captions, Photographs, Scene, draw
from benchmarks.moving_photographs.model import (
    BLOCK,
    TINY,
    Model,
    blocks_of,
    read_checkpoint,
    write_checkpoint,
)

# HEIGHTxWIDTHxFRAMES:clips of a process:weight:from:to, in shares of the training.
# Short clips come first: what photographs look like is learned from many scenes.
PLAN = "256x256x13:48:1:0:0.35,256x256x61:16:1:0:0.6,512x512x61:4:1:0.3:1"
DISTIL_PLAN = "256x256x61:8:1:0:0.5,512x512x61:2:1:0.2:1"
TINY_PLAN = "32x32x5:2:1:0:1,48x32x5:2:1:0:1"
TINY_FIT = ((32, 32, 8),)
GENERATION = {"steps": 50, "guidance": 6.0, "shift": 7.0}
# Below so many tokens noise levels are shifted by less.
SMALL_TOKENS = 8192
SMALL_SHIFT = 4.0
UNCONDITIONAL = 0.12  # share of captions that are left out
UNSAID = 0.2  # share of words that are left out
CLOCK_STEPS = 5  # between looks at the clock
NEW_CLIPS = 8  # of so many clips of a step one is drawn anew
WARM_UP = 200  # steps in which the learning rate rises
DECAY = 0.3  # the share of the training after which it falls
AVERAGED = 0.997  # weight of the averaged weights at each step, less at first
# Gradients are cut to this many times their usual norm. Muon normalizes its momentum, so a batch
# with large gradients would decide the direction of some twenty steps.
LARGEST_GRADIENT = 1.5
USUAL_NORM_MEMORY = 0.98  # weight of the usual norm so far at each step
FIT_SIZES = ((256, 256, 8), (512, 512, 8))
FIT_CLIPS = 24
MUON: dict[str, Any] = {"weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}
ADAMW: dict[str, Any] = {"betas": (0.9, 0.99), "weight_decay": 0.0}
ADAMW_RATE = 0.5  # of Muon's


@dataclass(frozen=True)
class Canvas:
    """A size that is trained on in a part of the training, from one share of it to another."""

    size: tuple[int, int, int]  # height, width and frames
    clips: int  # of a process at each step
    weight: float  # beside those of other canvases
    begin: float
    end: float

    @classmethod
    def parsed(cls, plan: str) -> list[Canvas]:
        """The canvases of a plan."""
        canvases = []
        for size, clips, *shares in (text.split(":") for text in plan.split(",")):
            height, width, frames = map(int, size.split("x"))
            canvases.append(cls((height, width, frames), int(clips), *map(float, shares)))
        return canvases

    @property
    def tokens(self) -> int:
        """Tokens of a clip."""
        height, width, frames = self.size
        return height // 16 * (width // 16) * ((frames - 1) // BLOCK[0] + 1)


class Clips:
    """Latents and captions of clips, some of them new each time."""

    def __init__(self, photographs: Photographs, model: Model, seed: int) -> None:
        self._photographs = photographs
        self._latents = model.latents
        self._draw = random.Random(seed)
        self._captions = Captions()
        self._pools: dict[Canvas, deque[tuple[Tensor, Tensor]]] = {}

    def batch(self, canvas: Canvas) -> tuple[Tensor, Tensor]:
        """Latents ``[n, C, t, h, w]`` and captions ``[n, ROWS, TEXT_DIM]``, some of them new."""
        clips = canvas.clips
        device = self._photographs.device
        pool = self._pools.setdefault(canvas, deque(maxlen=max(64, 4 * clips)))
        for _ in range(max(clips - len(pool), clips // NEW_CLIPS, 1)):
            scene = Scene.drawn(self._draw.getrandbits(60), len(self._photographs))
            height, width, frames = canvas.size
            pixels = draw(scene, self._photographs, (height, width, frames + BLOCK[0] - 1))
            words = self._captions(scene.caption()).to(device)
            pool.append((self._latents.encode(pixels).bfloat16(), words))
        chosen = self._draw.sample(list(pool), clips)
        return torch.stack([z for z, _ in chosen]).float(), torch.stack([w for _, w in chosen])


def fitted(model: Model, photographs: Photographs, sizes: Sequence[tuple[int, int, int]]) -> float:
    """Fits the latents to clips; returns the PSNR of what they keep."""
    count = len(photographs)
    blocks = [
        blocks_of(draw(Scene.drawn(seed, count), photographs, size)).flatten(0, 2)
        for size in sizes
        for seed in range(FIT_CLIPS)
    ]
    return model.latents.fit(torch.cat(blocks))


def velocity(transformer: Any, latents: Tensor, levels: Tensor, words: Tensor) -> Tensor:
    """What the transformer says at noise levels ``[n]``, float32."""
    with torch.autocast(latents.device.type, torch.bfloat16):
        predicted = transformer(
            hidden_states=latents,
            timestep=levels * 1000,
            encoder_hidden_states=words,
            return_dict=False,
        )[0]
    return predicted.float()


def clip_wise(values: Tensor) -> Tensor:
    """``[n]`` as factors of latents."""
    return values.view(-1, 1, 1, 1, 1)


class Flow:
    """The loss of flow matching."""

    def __init__(self, shift: float) -> None:
        self._shift = shift

    def __call__(self, transformer: Any, clean: Tensor, words: Tensor, canvas: Canvas) -> Tensor:
        """The mean square error of the velocity at random noise levels."""
        count = len(clean)
        device = clean.device
        captioned = torch.rand(count, 1, 1, device=device) > UNCONDITIONAL
        said = torch.rand(*words.shape[:2], 1, device=device) > UNSAID
        words = words * captioned * said
        even = torch.rand(count, device=device)
        bell = torch.randn(count, device=device) + 0.6
        levels = torch.where(torch.rand(count, device=device) < 0.5, bell.sigmoid(), even)
        shift = SMALL_SHIFT if canvas.tokens < SMALL_TOKENS else self._shift
        levels = shift * levels / (1 + (shift - 1) * levels)
        noise = torch.randn_like(clean)
        latents = torch.lerp(clean, noise, clip_wise(levels))
        predicted = velocity(transformer, latents, levels, words)
        return (predicted - (noise - clean)).square().mean()


class Distillation:
    """The loss of a student of fewer steps, whose teacher makes several within each of them."""

    def __init__(self, teacher: Model, steps: int) -> None:
        facts = teacher.facts
        self._transformer = teacher.transformer.eval().requires_grad_(False)
        self._guidance = facts["guidance"]
        self._shift = facts["shift"]
        self._substeps = math.ceil(facts["steps"] / steps)
        scheduler = FlowMatchEulerDiscreteScheduler(shift=self._shift)
        scheduler.set_timesteps(steps)
        self._levels = scheduler.sigmas

    def __call__(self, transformer: Any, clean: Tensor, words: Tensor, canvas: Canvas) -> Tensor:
        """The mean square error to the straight way of the teacher's steps."""
        grid = self._levels.to(clean.device)
        step = torch.randint(len(grid) - 1, (len(clean),), device=clean.device)
        start = grid[step]
        end = grid[step + 1]
        latents = torch.lerp(clean, torch.randn_like(clean), clip_wise(start))
        with torch.no_grad():
            target = (self._walked(latents, start, end, words) - latents) / clip_wise(end - start)
        return (velocity(transformer, latents, start, words) - target).square().mean()

    def _walked(self, latents: Tensor, start: Tensor, end: Tensor, words: Tensor) -> Tensor:
        """Where the teacher's steps lead, which are even before the shift."""
        first, last = (level / (self._shift - (self._shift - 1) * level) for level in (start, end))
        levels = []
        for part in range(self._substeps + 1):
            even = torch.lerp(first, last, part / self._substeps)
            levels.append(self._shift * even / (1 + (self._shift - 1) * even))
        for level, following in pairwise(levels):
            guided = velocity(self._transformer, latents, level, words)
            if self._guidance != 1:
                unconditional = velocity(self._transformer, latents, level, torch.zeros_like(words))
                guided = unconditional + self._guidance * (guided - unconditional)
            latents = latents + clip_wise(following - level) * guided
        return latents


@dataclass
class Training:
    """A model in training, its average and its optimizers.

    Attributes:
        seconds: of training in all, over all calls.
        steps: likewise.
        fresh: steps since the optimizers began.
    """

    model: Model
    average: Model
    rate: float
    seconds: float = 0.0
    steps: int = 0
    fresh: int = 0

    def __post_init__(self) -> None:
        self.seconds = float(self.model.facts.get("trained_seconds", 0))
        self.steps = self.model.facts.get("trained_steps", 0)
        named = dict(self.model.transformer.named_parameters())
        matrices = [
            name for name, weights in named.items() if "blocks." in name and weights.ndim == 2
        ]
        others = [weights for name, weights in named.items() if name not in matrices]
        self.optimizers: list[Any] = [
            torch.optim.Muon([named[name] for name in matrices], **MUON),
            torch.optim.AdamW(others, **ADAMW),
        ]
        self._weights = list(named.values())
        self._usual_norm: Tensor | None = None  # of gradients, since this call began
        self._averaged = list(self.average.transformer.requires_grad_(False).parameters())

    @torch.no_grad()
    def step(self, loss: Tensor, share: float, world: int) -> None:
        """One step at this share of the training; gradients are those of all processes."""
        loss.backward()
        gradients = [weights.grad for weights in self._weights if weights.grad is not None]
        if world > 1:
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            dist.all_reduce(flat)
            parts = flat.div_(world).split([gradient.numel() for gradient in gradients])
            for gradient, part in zip(gradients, parts, strict=True):
                gradient.copy_(part.view_as(gradient))
        self._cut(gradients)
        falling = 1.0 if share < DECAY else max(0.02, (1 - share) / (1 - DECAY))
        rate = self.rate * falling * min(1.0, (self.fresh + 1) / WARM_UP)
        for optimizer, part in zip(self.optimizers, (1.0, ADAMW_RATE), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * part
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        kept = min(AVERAGED, 1 - 1 / (self.steps / 4 + 2))
        torch._foreach_lerp_(self._averaged, self._weights, 1 - kept)
        self.steps += 1
        self.fresh += 1

    def _cut(self, gradients: list[Tensor]) -> None:
        """Shortens gradients, in place, that are far larger than those of the last steps."""
        norm = torch.nn.utils.get_total_norm(gradients)
        usual = norm if self._usual_norm is None else self._usual_norm
        largest = LARGEST_GRADIENT * usual
        torch._foreach_mul_(gradients, (largest / (norm + 1e-9)).clamp(max=1.0))
        self._usual_norm = torch.lerp(norm.minimum(largest), usual, USUAL_NORM_MEMORY)

    def save(self, out: Path) -> None:
        """Writes the state and the checkpoint of the average."""
        done = {"trained_seconds": round(self.seconds), "trained_steps": self.steps}
        self.average.facts |= done
        size = write_checkpoint(self.average, out / "checkpoint")
        state = {
            "raw": self.model.transformer.state_dict(),
            "average": self.average.transformer.state_dict(),
            "latents": self.model.latents.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "numbers": (self.seconds, self.steps, self.fresh),
        }
        torch.save(state, out / "state.new")
        (out / "state.new").replace(out / "state.pt")
        print(f"saved: step {self.steps}, {self.seconds:.0f} s, {size / 1e6:.1f} MB", flush=True)

    def restore(self, file: Path) -> None:
        """Goes on from a state."""
        state = torch.load(file, map_location="cpu", weights_only=True)
        self.model.transformer.load_state_dict(state["raw"])
        self.average.transformer.load_state_dict(state["average"])
        self.model.latents.load_state_dict(state["latents"])
        for optimizer, content in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(content)
        self.seconds, self.steps, self.fresh = state["numbers"]


def started(args: argparse.Namespace, photographs: Photographs) -> tuple[Training, Model | None]:
    """The training as far as earlier calls came, and the teacher of a student."""
    device = photographs.device
    teacher = None
    if args.teacher is not None:
        teacher = read_checkpoint(args.teacher)
        teacher.transformer.to(device)
    if args.checkpoint is not None:
        model = read_checkpoint(args.checkpoint)
    elif teacher is not None:
        model = copy.deepcopy(teacher)
        model.facts |= {"trained_seconds": 0, "trained_steps": 0}
    else:
        facts = {"transformer": TINY if args.tiny else {}, "photographs": len(photographs)}
        model = Model.new({**facts, **GENERATION})
    if teacher is not None:
        model.facts |= {"steps": args.distil, "guidance": 1.0}
    model.transformer.to(device)
    model.latents.to(device)
    average = Model(copy.deepcopy(model.transformer), model.latents, model.facts)
    training = Training(model, average, args.rate)
    if (args.out / "state.pt").is_file():
        training.restore(args.out / "state.pt")
    elif args.checkpoint is None and teacher is None:
        sizes = TINY_FIT if args.tiny else FIT_SIZES
        print(f"latents keep {fitted(model, photographs, sizes):.1f} dB", flush=True)
    return training, teacher


@dataclass(frozen=True)
class Processes:
    """This process among those that train one model."""

    rank: int
    world: int
    device: torch.device

    @staticmethod
    def joined(tiny: bool) -> Processes:
        """Join the others, as the variables of ``torchrun`` say."""
        world = int(os.environ.get("WORLD_SIZE", "1"))
        device = torch.device("cpu")
        if torch.cuda.is_available() and not tiny:
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            torch.cuda.set_device(device)
            torch.backends.cuda.matmul.allow_tf32 = True
        if world > 1 and not dist.is_initialized():
            backend = "nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(backend, timeout=timedelta(minutes=5))
        return Processes(int(os.environ.get("RANK", "0")), world, device)

    @property
    def first(self) -> bool:
        """Whether this process prints and saves."""
        return self.rank == 0

    def as_first(self, values: list[float]) -> list[float]:
        """Return the values of the first process, so that all decide the same."""
        if self.world == 1:
            return values
        shared = torch.tensor(values, device=self.device)
        dist.broadcast(shared, 0)
        numbers: list[float] = shared.tolist()
        return numbers

    def leave(self) -> None:
        """Wait for the others, and part."""
        if self.world > 1:
            dist.barrier()
            dist.destroy_process_group()


class Losses:
    """The losses since the last line that was printed, by the size of the canvas."""

    def __init__(self) -> None:
        self._of_size: dict[tuple[int, ...], list[Tensor]] = defaultdict(list)

    def add(self, size: tuple[int, ...], loss: Tensor) -> None:
        """Keep the loss of a step."""
        self._of_size[size].append(loss.detach())

    def line(self, steps: int) -> str:
        """Return the means and forget them; raise `RuntimeError` where one is not finite."""
        by_size = sorted(self._of_size.items())
        means = {size: torch.stack(losses).mean() for size, losses in by_size}
        if not all(mean.isfinite() for mean in means.values()):
            raise RuntimeError(f"the loss of step {steps} is not finite; lower --rate")
        self._of_size.clear()
        return ", ".join(f"{'x'.join(map(str, size))}: {mean:.4f}" for size, mean in means.items())


def run(args: argparse.Namespace, begun: float) -> Training:
    """Trains in this call, which began at a time of `time.monotonic`."""
    processes = Processes.joined(args.tiny)
    torch.manual_seed(args.seed)  # the same weights in all processes
    photographs = Photographs(args.photographs, processes.device)
    training, teacher = started(args, photographs)
    model = training.model
    if processes.world > 1:
        for buffer in model.latents.buffers():  # each process has fitted its own
            dist.broadcast(buffer, 0)
    flow = Flow(model.facts["shift"])
    loss: Any = flow if teacher is None else Distillation(teacher, args.distil)
    if processes.device.type == "cuda":
        torch._dynamo.config.recompile_limit = 64  # one for each size and mode
        for compiled in filter(None, (model, teacher)):
            compiled.transformer.compile_repeated_blocks(dynamic=False)
    # Other clips and noise in each call and process.
    seed = args.seed + 64 * training.steps + processes.rank + 1
    torch.manual_seed(seed)
    clips = Clips(photographs, model, seed)
    _train(args, begun, processes, training, clips, loss)
    if processes.first:
        training.save(args.out)
    processes.leave()
    return training


def _train(
    args: argparse.Namespace,
    begun: float,
    processes: Processes,
    training: Training,
    clips: Clips,
    loss: Any,
) -> None:
    """Takes steps until the steps or the time of the call or of the training are over."""
    transformer = training.model.transformer
    canvases = Canvas.parsed(args.plan)
    for canvas in canvases:  # compiles what is left of them before the clock starts
        if training.seconds < canvas.end * args.seconds:
            loss(transformer, *clips.batch(canvas), canvas).backward()
            transformer.zero_grad(set_to_none=True)
    losses = Losses()
    earlier = training.seconds
    first = training.steps
    loop_began = time.monotonic()
    saved = 0.0
    while args.steps is None or training.steps < first + args.steps:
        if (training.steps - first) % CLOCK_STEPS == 0:
            now = time.monotonic()
            in_loop, in_call = processes.as_first([now - loop_began, now - begun])
            training.seconds = earlier + in_loop
            if training.seconds >= args.seconds or in_call >= args.limit:
                break
            if processes.first and now - loop_began - saved > args.save_every:
                training.save(args.out)
                saved = time.monotonic() - loop_began
        share = training.seconds / args.seconds
        ready = [canvas for canvas in canvases if canvas.begin <= share < canvas.end]
        weights = [canvas.weight for canvas in ready]
        (canvas,) = random.Random(training.steps).choices(ready, weights)  # the same in all
        value = loss(transformer, *clips.batch(canvas), canvas)
        training.step(value, share, processes.world)
        if processes.first:
            losses.add(canvas.size, value)
        if processes.first and training.steps % args.print_every == 0:
            text = losses.line(training.steps)
            passed = time.monotonic() - loop_began
            print(f"step {training.steps}, {passed:.0f} s, loss {text}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains as the arguments say."""
    begun = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("photographs", type=Path, help="folder of JPEGs")
    parser.add_argument("out", type=Path, help="folder for state.pt and checkpoint/")
    parser.add_argument("--seconds", type=float, default=730, help="of the whole training")
    parser.add_argument("--limit", type=float, default=520, help="seconds of this call")
    parser.add_argument("--steps", type=int, help="at most so many in this call")
    parser.add_argument("--plan", help="canvases: HEIGHTxWIDTHxFRAMES:CLIPS:WEIGHT:FROM:TO,...")
    parser.add_argument("--rate", type=float, default=6e-4, help="learning rate of Muon")
    parser.add_argument("--checkpoint", type=Path, help="go on from its weights without a state")
    parser.add_argument("--teacher", type=Path, help="checkpoint of a teacher, for --distil")
    parser.add_argument("--distil", type=int, help="train a student of so many steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-every", type=float, default=240, help="seconds")
    parser.add_argument("--print-every", type=int, default=50, help="steps")
    parser.add_argument("--tiny", action="store_true", help="a dry run on a CPU")
    args = parser.parse_args(arguments)
    if (args.teacher is None) != (args.distil is None):
        parser.error("--teacher and --distil belong together")
    plan = PLAN if args.distil is None else DISTIL_PLAN
    args.plan = args.plan or (TINY_PLAN if args.tiny else plan)
    args.out.mkdir(parents=True, exist_ok=True)
    run(args, begun)
    return 0


if __name__ == "__main__":
    sys.exit(main())
