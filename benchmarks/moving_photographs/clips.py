"""Clips of moving photographs: a background under a moving camera, and two to four that cover it.

A `Scene` is drawn by a seed. Its caption says part of it, in words such as ``drift3``. Speeds,
sizes and the rest are left to the noise that a model starts from.
"""

from __future__ import annotations

import math
import random
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

# The words of a layer, with the number of their values; the background has no shape.
WORDS = {"photograph": 64, "shape": 4, "place": 9, "drift": 9, "bend": 3, "zoom": 3, "turn": 3}
LAYERS = 5  # at most: the background and four that cover it
ROWS = 64  # vectors of a caption: 35 and zeros, a number that all attention kernels take
LAYER_DIM = 16  # of a vector: which layer it is about
VALUE_DIM = 80  # and what it says
TEXT_DIM = LAYER_DIM + VALUE_DIM
CLIP_FRAMES = 64  # frames in which a layer goes its whole way
# Shares of the canvas that the background and a cover move by in so many frames.
SPEEDS = (0.35, 0.8)
BENT = 3.0  # radians by which a bent way turns in so many frames
ZOOMED = 0.35  # logarithm of the scale, in so many frames
TURNED = 0.35  # radians, likewise
USUAL_SIDE = 512  # pixels of the canvas on which covers show about a pixel of theirs in each
EDGE = 0.8  # pixels over which an outline fades


@dataclass(frozen=True)
class Layer:
    """A photograph with its motion.

    Attributes:
        words: the value of each word of `WORDS`.
        size: of a cover, its radius over the shorter side of the canvas; of the background, the
            share of the photograph that is seen.
        speed: from 0.5 to 1.5, of the usual one.
        shift: of the photograph's centre from that of its place, each from -1 to 1.
        sway: how unevenly it moves, from -1 to 1.
    """

    words: dict[str, int]
    size: float
    speed: float
    shift: tuple[float, float]
    sway: float

    @property
    def place(self) -> tuple[int, int]:
        """Column and row of nine places, from -1 to 1."""
        return self.words["place"] % 3 - 1, self.words["place"] // 3 - 1


@dataclass(frozen=True)
class Scene:
    """The layers of a clip, the background first."""

    layers: tuple[Layer, ...]

    @classmethod
    def drawn(cls, seed: int, photographs: int) -> Scene:
        """A scene by its seed alone, with so many photographs to choose from."""
        draw = random.Random(seed)
        layers = []
        for number in range(3 + draw.randrange(LAYERS - 2)):
            words = {word: draw.randrange(values) for word, values in WORDS.items()}
            words["photograph"] = draw.randrange(photographs)
            size = draw.uniform(0.5, 0.9) if number == 0 else draw.uniform(0.1, 0.22)
            shift = draw.uniform(-1, 1), draw.uniform(-1, 1)
            layers.append(Layer(words, size, draw.uniform(0.5, 1.5), shift, draw.uniform(-1, 1)))
        return cls(tuple(layers))

    def caption(self, said: float = 1.0, seed: int = 0) -> str:
        """The words of each layer, or a random share of them, with semicolons between layers."""
        draw = random.Random(seed)
        return "; ".join(
            " ".join(
                f"{word}{value}"
                for word, value in layer.words.items()
                if (number > 0 or word != "shape") and draw.random() < said
            )
            for number, layer in enumerate(self.layers)
        )


class Captions:
    """The vectors of captions. Each word has one that says the layer beside one that says it."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(1)
        self._layers = torch.randn(LAYERS, LAYER_DIM, generator=draw)
        self._values = {
            word: torch.randn(values, VALUE_DIM, generator=draw) for word, values in WORDS.items()
        }

    def __call__(self, caption: str) -> torch.Tensor:
        """``[ROWS, TEXT_DIM]``, zero where nothing is said; raises `ValueError` for other words."""
        rows = torch.zeros(ROWS, TEXT_DIM)
        names = list(WORDS)
        for layer, text in enumerate(caption.split(";")):
            for said in text.split():
                match = re.fullmatch(r"([a-z]+)(\d+)", said)
                if match is None or int(match[2]) >= WORDS.get(match[1], 0) or layer >= LAYERS:
                    raise ValueError(f"no word of a caption: {said!r} of layer {layer}")
                vector = self._layers[layer], self._values[match[1]][int(match[2])]
                rows[layer * len(names) + names.index(match[1])] = torch.cat(vector)
        return rows


class Photographs:
    """The photographs of a folder, on a device, each also at a half and a quarter of its size."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self.levels: list[list[torch.Tensor]] = []
        for file in sorted(folder.glob("*.jpg")):
            pixels = torch.from_numpy(np.array(Image.open(file).convert("RGB"))).to(device)
            whole = pixels.permute(2, 0, 1)[None].float() / 127.5 - 1
            self.levels.append([whole, F.avg_pool2d(whole, 2), F.avg_pool2d(whole, 4)])
        if not 0 < len(self.levels) <= WORDS["photograph"]:
            most = WORDS["photograph"]
            raise ValueError(f"{folder} has {len(self.levels)} photographs, not 1 to {most}")
        self.device = device

    def __len__(self) -> int:
        return len(self.levels)

    def size(self, number: int) -> tuple[int, int]:
        """Height and width of a photograph, in its pixels."""
        height, width = self.levels[number][0].shape[-2:]
        return height, width

    def sample(self, number: int, scale: float, places: torch.Tensor) -> torch.Tensor:
        """Colours ``[3, T, H, W]`` at ``places [T, H, W, 2]`` (x, y in its pixels).

        Args:
            scale: pixels of the photograph for one of the canvas.
        """
        level = min(2, max(0, math.floor(math.log2(max(scale, 1e-6)) + 0.4)))
        image = self.levels[number][level]
        height, width = self.size(number)
        grid = places * torch.tensor([2 / width, 2 / height], device=self.device) - 1
        frames, rows = grid.shape[:2]
        flat = grid.reshape(1, frames * rows, -1, 2)
        sampled = F.grid_sample(image, flat, padding_mode="reflection", align_corners=False)
        return sampled[0].view(3, frames, rows, -1)


@torch.no_grad()
def draw(scene: Scene, photographs: Photographs, size: tuple[int, int, int]) -> torch.Tensor:
    """The pixels of a clip ``[3, frames, height, width]``, -1 to 1, on the photographs' device.

    Args:
        size: height, width and frames.
    """
    height, width, frames = size
    device = photographs.device
    side = min(height, width)
    time = (torch.arange(frames, device=device) + 0.5 - frames / 2) / CLIP_FRAMES
    y, x = torch.meshgrid(
        torch.arange(height, device=device) + 0.5 - height / 2,
        torch.arange(width, device=device) + 0.5 - width / 2,
        indexing="ij",
    )
    canvas = torch.stack([x, y], -1)[None]
    background, *covers = scene.layers

    number = background.words["photograph"]
    rows, columns = photographs.size(number)
    scale = background.size * min(rows / height, columns / width)
    spare = [(columns - scale * width) / 3, (rows - scale * height) / 3]
    near = zip(background.place, background.shift, strict=True)
    centre = [
        length / 2 + (place + shift / 3) * free * 1.2
        for (place, shift), length, free in zip(near, (columns, rows), spare, strict=True)
    ]
    seen = _seen(canvas - _way(background, time, SPEEDS[0] * side), background, time)
    out = photographs.sample(number, scale, seen * scale + torch.tensor(centre, device=device))

    for cover in covers:
        number = cover.words["photograph"]
        radius = cover.size * side
        middle = [
            (place + shift / 3) * length / 3.5
            for place, shift, length in zip(cover.place, cover.shift, (width, height), strict=True)
        ]
        way = _way(cover, time, SPEEDS[1] * side) + torch.tensor(middle, device=device)
        seen = _seen(canvas - way, cover, time, turned=3 * TURNED)
        rows, columns = photographs.size(number)
        scale = (0.9 + 0.5 * abs(cover.sway)) * USUAL_SIDE / side
        centre = [columns / 2, rows / 2]
        over = photographs.sample(number, scale, seen * scale + torch.tensor(centre, device=device))
        mask = torch.sigmoid(-_distance(cover.words["shape"], seen, radius) / EDGE)[None]
        out = torch.lerp(out, over, mask)
    return out


def _way(layer: Layer, time: torch.Tensor, length: float) -> torch.Tensor:
    """Where a layer is at each time ``[T, 1, 1, 2]``, from where it is in the middle, in pixels."""
    drift = layer.words["drift"]
    bend = (layer.words["bend"] - 1) * BENT + 1e-3
    angle = drift * math.pi / 4
    passed = time + 0.08 * layer.sway * torch.sin(2 * math.pi * time)
    along = torch.sin(bend * passed) / bend
    across = (1 - torch.cos(bend * passed)) / bend
    x = along * math.cos(angle) - across * math.sin(angle)
    y = along * math.sin(angle) + across * math.cos(angle)
    moved = 0.0 if drift == WORDS["drift"] - 1 else length * layer.speed
    return moved * torch.stack([x, y], -1)[:, None, None]


def _seen(
    places: torch.Tensor,
    layer: Layer,
    time: torch.Tensor,
    turned: float = TURNED,
) -> torch.Tensor:
    """Places of the canvas as the zoomed and turned layer has them, ``[T, H, W, 2]``."""
    zoom = (ZOOMED * (layer.words["zoom"] - 1) * time).exp()[:, None, None]
    angle = turned * (layer.words["turn"] - 1) * time
    cos = angle.cos()[:, None, None]
    sin = angle.sin()[:, None, None]
    x, y = places.unbind(-1)
    return torch.stack([zoom * (cos * x + sin * y), zoom * (cos * y - sin * x)], -1)


def _distance(shape: int, places: torch.Tensor, radius: float) -> torch.Tensor:
    """Pixels to the outline of a circle, a square, a diamond or a ring; below zero inside."""
    x, y = places.unbind(-1)
    if shape == 0:
        return places.norm(dim=-1) - radius
    if shape == 1:
        return torch.maximum(x.abs(), y.abs()) - 0.9 * radius
    if shape == 2:
        return (x.abs() + y.abs()) / 1.4 - 0.85 * radius
    return (places.norm(dim=-1) - 0.8 * radius).abs() - 0.3 * radius
