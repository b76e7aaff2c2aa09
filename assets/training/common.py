"""What the training scripts share: examples, the one-pass VAE, schedules, logs and pictures."""

from __future__ import annotations

import csv
import functools
import os
import textwrap
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from captions import describe
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import WanResample
from matplotlib.figure import Figure
from PIL import Image, ImageDraw
from scenes import FRAMES, PAIRS, sample_scene, stage
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

Example = tuple[dict[str, np.ndarray], str]  # staging arrays and a caption
Batches = Iterator[tuple[dict[str, Tensor], list[str]]]


class Examples(Dataset):
    """Endless examples, numbered: `make` gets a random generator of its own for each."""

    def __init__(self, make: Callable[[np.random.Generator], Example], *, seed: int) -> None:
        self.make, self.seed = make, seed

    def __getitem__(self, index: int) -> Example:
        return self.make(np.random.default_rng([self.seed, index]))


def load_examples(
    make: Callable[[np.random.Generator], Example],
    *,
    seed: int,
    first: int,
    batch: int,
    workers: int,
) -> Batches:
    """Batches of `Examples` from number `first` on, without end, drawn up by worker processes."""
    return iter(
        DataLoader(
            Examples(make, seed=seed),
            batch_size=batch,
            sampler=range(first, 1 << 40),
            num_workers=workers,
            prefetch_factor=8 if workers else None,
        )
    )


def make_clip(rng: np.random.Generator, *, pairs: float = PAIRS, frames: int = FRAMES) -> Example:
    """The staging arrays of a clip and its caption."""
    scene = sample_scene(rng, pairs=pairs)
    caption = describe(scene, rng)
    return stage(scene, rng, frames=frames), caption


def load_clips(
    *,
    seed: int,
    first: int,
    batch: int,
    workers: int,
    pairs: float = PAIRS,
    frames: int = FRAMES,
) -> Batches:
    """`load_examples` of clips."""
    make = functools.partial(make_clip, pairs=pairs, frames=frames)
    return load_examples(make, seed=seed, first=first, batch=batch, workers=workers)


def to_device(staging: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Copies a batch of staging arrays."""
    return {name: value.to(device, non_blocking=True) for name, value in staging.items()}


def use_one_pass(vae: AutoencoderKLWan) -> None:
    """Makes `vae.encoder` and `vae.decoder` take whole clips at once, without feature caches.

    `AutoencoderKLWan.encode` and `.decode` walk a clip in chunks of frames, with caches that carry
    each convolution's past. One causal pass over all frames gives the same numbers and is faster;
    only the changes of frame rate, which the cached path alone performs, have to be added to it.
    """
    for module in vae.modules():
        if isinstance(module, WanResample):
            module.forward = types.MethodType(_resample, module)


def _resample(
    self: WanResample, x: Tensor, feat_cache: None = None, feat_idx: tuple[int, ...] = (0,)
) -> Tensor:
    """`WanResample.forward` over a whole clip (B, C, F, H, W); the first frame stands alone."""
    if self.mode == "upsample3d" and x.shape[2] > 1:
        later = self.time_conv(x[:, :, 1:]).unflatten(1, (2, -1))  # (B, 2, C, F - 1, H, W)
        later = later.permute(0, 2, 3, 1, 4, 5).flatten(2, 3)
        x = torch.cat([x[:, :, :1], later], dim=2)
    frames = x.shape[2]
    x = self.resample(x.permute(0, 2, 1, 3, 4).flatten(0, 1))
    x = x.unflatten(0, (-1, frames)).permute(0, 2, 1, 3, 4)
    if self.mode == "downsample3d" and frames > 1:
        x = torch.cat([x[:, :, :1], self.time_conv(x)], dim=2)
    return x


def encode_moments(vae: AutoencoderKLWan, video: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and log variance (B, z, f, h, w) of a video's latents, after `use_one_pass`."""
    mean, log_variance = vae.quant_conv(vae.encoder(video)).chunk(2, dim=1)
    return mean, log_variance.clamp(-30.0, 20.0)


def decode_latents(vae: AutoencoderKLWan, latents: Tensor) -> Tensor:
    """Video (B, 3, F, H, W), not clamped, after `use_one_pass`."""
    return vae.decoder(vae.post_quant_conv(latents))


class Ranks:
    """The processes that train together, one per GPU (torchrun starts them), or this one alone."""

    def __init__(self) -> None:
        self.rank, self.count = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.device = torch.device("cpu")
        if torch.cuda.is_available():
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
            torch.cuda.set_device(self.device)
        if self.count > 1:
            cuda = self.device.type == "cuda"
            dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")

    def average_gradients(self, params: list[Tensor]) -> None:
        """Gives every rank the mean of all ranks' gradients."""
        if self.count == 1:
            return
        grads = [p.grad for p in params if p.grad is not None]
        flat = torch.cat([g.flatten() for g in grads])
        dist.all_reduce(flat)
        parts = flat.div_(self.count).split([g.numel() for g in grads])
        torch._foreach_copy_(grads, [p.view_as(g) for p, g in zip(parts, grads, strict=True)])

    def close(self) -> None:
        """Ends the cooperation."""
        if self.count > 1:
            dist.destroy_process_group()

    def agree(self, seconds: float) -> float:
        """The first rank's number, on every rank."""
        if self.count == 1:
            return seconds
        number = torch.tensor([seconds], dtype=torch.float64)
        dist.broadcast(number, src=0)
        return number.item()


class Schedule:
    """How far training is, by steps or by seconds (all runs together), and when to pause.

    Args:
        steps, seconds: training is over when either is reached
        pause_after: seconds of this run after which to stop early
        step, spent: where an earlier run stopped
        ranks: whose clocks agree
    """

    def __init__(
        self,
        *,
        steps: int,
        seconds: float,
        pause_after: float,
        step: int,
        spent: float,
        ranks: Ranks,
    ) -> None:
        self.steps, self.seconds, self.pause_after = steps, seconds, pause_after
        self.step, self.before, self.ranks = step, spent, ranks
        self.start_clock()

    def start_clock(self) -> None:
        """Counts this run's seconds from now on."""
        self.start = time.monotonic()
        self.elapsed = 0.0

    def advance(self) -> None:
        """Counts a step and looks at the clock."""
        self.step += 1
        self.elapsed = self.ranks.agree(time.monotonic() - self.start)

    @property
    def spent(self) -> float:
        """Seconds of training, all runs together."""
        return self.before + self.elapsed

    @property
    def progress(self) -> float:
        """Share of the training that is done, in [0, 1]."""
        return min(1.0, max(self.step / self.steps, self.spent / self.seconds))

    @property
    def running(self) -> bool:
        """Whether to take another step."""
        return self.progress < 1.0 and self.elapsed < self.pause_after

    def rate(self, *, warmup: int, decay_from: float) -> float:
        """Share of the peak learning rate: a warm-up, a plateau, then a line down to 1 %."""
        down = (1.0 - self.progress) / (1.0 - decay_from)
        return min(1.0, (self.step + 1) / warmup, max(0.01, down))


def update_average(average: list[Tensor], values: list[Tensor], *, step: int, decay: float) -> None:
    """Moves an exponential moving average; young averages move faster."""
    decay = min(decay, (1 + step) / (10 + step))
    torch._foreach_lerp_(average, values, 1.0 - decay)


class Log:
    """Rows of numbers in a CSV file, continued by later runs."""

    def __init__(self, path: Path, *, fields: tuple[str, ...]) -> None:
        self.path, self.fields = path, fields
        if not path.exists():
            path.write_text(",".join(fields) + "\n")

    def add(self, **values: float) -> None:
        """Appends a row and prints it."""
        row = [f"{values[name]:.6g}" for name in self.fields]
        with self.path.open("a") as file:
            file.write(",".join(row) + "\n")
        pairs = zip(self.fields, row, strict=True)
        print(" ".join(f"{name} {value}" for name, value in pairs), flush=True)


def to_images(pictures: Tensor) -> list[Image.Image]:
    """Pillow's images of (B, 3, H, W) in [-1, 1]."""
    pixels = pictures.clamp(-1, 1).add(1).mul(127.5).round().byte().permute(0, 2, 3, 1).cpu()
    return [Image.fromarray(image.numpy()) for image in pixels]


def still_sheet(images: list[Image.Image], captions: list[str], *, columns: int = 4) -> Image.Image:
    """The images in rows, each over its caption."""
    width, height = images[0].size
    words = width // 6  # letters of a line
    lines = [textwrap.wrap(caption, words)[:4] for caption in captions]
    below = 4 + 12 * max(map(len, lines))
    sheet = Image.new("RGB", (columns * (width + 4), -(-len(images) // columns) * (height + below)))
    pen = ImageDraw.Draw(sheet)
    for number, (image, text) in enumerate(zip(images, lines, strict=True)):
        left, top = number % columns * (width + 4), number // columns * (height + below)
        sheet.paste(image, (left, top))
        place = (left + 2, top + height + 1)
        pen.multiline_text(place, "\n".join(text), fill=(255, 255, 255), spacing=1)
    return sheet


def clip_sheet(video: Tensor, captions: list[str], *, every: int = 4) -> Image.Image:
    """A row of frames (each `every`-th) per clip of `video` (B, 3, F, H, W) in [-1, 1]."""
    rows = F.pad(video[:, :, ::every], (0, 2), value=-1.0)  # a gap beside each frame
    return still_sheet(to_images(rows.transpose(2, 3).flatten(3)), captions, columns=1)


def save_sheet(sheet: Image.Image, path: Path) -> None:
    """WebP of a contact sheet, small enough to keep with the code: 20 to 70 kB."""
    sheet.save(path, quality=40, method=6)


def loss_curve(log: Path, path: Path, *, field: str, title: str) -> None:
    """A picture of one column of a `Log` against its "step" column, on a logarithmic axis."""
    with log.open() as file:
        rows = [(float(row["step"]), float(row[field])) for row in csv.DictReader(file)]
    if not rows:
        return
    figure = Figure((8, 4), layout="constrained")
    axes = figure.add_subplot(title=f"{title}, against step", yscale="log")
    steps, values = np.array(rows).T
    axes.plot(steps, values)
    axes.set_ylim(top=np.quantile(values, 0.99))  # the first losses are far above
    axes.grid(which="both", alpha=0.3)
    figure.savefig(path, pil_kwargs={"lossless": True, "method": 6})
