"""Draws staged scenes as anti-aliased video, in torch, for a whole batch at once.

Every shape is a signed distance function on coordinates in which the object is upright, centred and
of radius about 1. The distance in pixels gives the coverage of each pixel.
"""

from __future__ import annotations

import math

import torch
from scenes import BACKGROUNDS, FILLS, SHAPES, SIZE
from torch import Tensor


def draw(staging: dict[str, Tensor], *, frames: slice = slice(None), side: int = SIZE) -> Tensor:
    """Video (B, 3, F, side, side), float32 in [-1, 1], of a batch of `scenes.stage` arrays.

    `frames` picks the frames to draw. Patterns of the background grow with `side`, objects do not:
    their paths are in pixels, and their edges are one pixel wide.
    """
    path = staging["path"][:, :, frames]  # (B, O, F, 4)
    axis = torch.arange(side, device=path.device, dtype=torch.float32) + 0.5
    x, y = axis.view(1, 1, 1, -1), axis.view(1, 1, -1, 1)

    scale = SIZE / side
    ground = _background(staging, x * scale, y * scale)  # (B, 1, H, W), share of the light shade
    shades = staging["ground"][:, :, :, None, None, None]  # (B, 2, 3, 1, 1, 1)
    video = shades[:, 0] + (shades[:, 1] - shades[:, 0]) * ground[:, None]
    for i in range(path.shape[1]):
        cover, light = _object(staging, path[:, i], i, x, y)  # (B, F, H, W) each
        shades = staging["colour"][:, i, :, :, None, None, None]
        colour = shades[:, 1] + (shades[:, 0] - shades[:, 1]) * light[:, None]
        video = video + (colour - video) * cover[:, None]
    return video * 2.0 - 1.0


def _background(staging: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    """Share of the light shade (B, 1, H, W), in [0, 1]; beyond it for the ends of gradients."""
    kind = staging["background"].view(-1, 1, 1, 1)
    shift_x, shift_y, turn = (v.view(-1, 1, 1, 1) for v in staging["phase"].unbind(1))
    u, v = x + shift_x, y + shift_y
    along = turn.cos() * (x - SIZE / 2) + turn.sin() * (y - SIZE / 2)
    stripe = turn.cos() * u + turn.sin() * v
    layers = {
        "plain": torch.full_like(u + v, 0.5),
        "gradient": 0.5 + 1.9 * along / SIZE,
        "checkerboard": 0.5 + 0.5 * _wave(u, 32.0) * _wave(v, 32.0),
        "stripes": 0.5 + 0.5 * _wave(stripe, 22.0),
        "dots": _dots(u, v, period=20.0, radius=5.5, pixel=1.0),
    }
    return _select(kind, [layers[name] for name in BACKGROUNDS])


def _object(
    staging: dict[str, Tensor], path: Tensor, index: int, x: Tensor, y: Tensor
) -> tuple[Tensor, Tensor]:
    """Coverage and share of the bright shade of one object, (B, F, H, W) each, in [0, 1]."""
    shape = staging["shape"][:, index].view(-1, 1, 1, 1)
    fill = staging["fill"][:, index].view(-1, 1, 1, 1)
    centre_x, centre_y, angle, radius = (v[:, :, None, None] for v in path.unbind(2))
    cos, sin = angle.cos(), angle.sin()
    dx, dy = (x - centre_x) / radius, (y - centre_y) / radius
    u, v = cos * dx + sin * dy, cos * dy - sin * dx

    distance = _select(shape, [DISTANCES[name](u, v) for name in SHAPES]) * radius
    cover = (0.5 - distance).clamp(0.0, 1.0) * (shape >= 0)
    fills = {
        "solid": torch.ones_like(u),
        "striped": 0.5 + 0.5 * _wave(v + 0.14, 0.56, sharpness=0.35 * radius),
        "dotted": 1.0 - _dots(u, v, period=0.68, radius=0.21, pixel=1.0 / radius),
        "checkered": 0.5
        + 0.5 * _wave(u, 1.16, sharpness=0.5 * radius) * _wave(v, 1.16, sharpness=0.5 * radius),
    }
    return cover, _select(fill, [fills[name] for name in FILLS])


def _select(which: Tensor, options: list[Tensor]) -> Tensor:
    """Per clip, the option that `which` (B, 1, 1, 1) numbers."""
    out = options[0]
    for i, option in enumerate(options[1:], start=1):
        out = torch.where(which == i, option, out)
    return out


def _wave(x: Tensor, period: float, *, sharpness: Tensor | float = 8.0) -> Tensor:
    """A square wave in [-1, 1] with edges about one pixel wide."""
    return (torch.sin(x * (2 * math.pi / period)) * sharpness).clamp(-1.0, 1.0)


def _dots(u: Tensor, v: Tensor, *, period: float, radius: float, pixel: Tensor | float) -> Tensor:
    """1 inside dots on a square grid, 0 outside; `pixel` is the size of one pixel in u and v."""
    du = u - period * torch.round(u / period)
    dv = v - period * torch.round(v / period)
    return ((radius - torch.sqrt(du * du + dv * dv + 1e-9)) / pixel + 0.5).clamp(0.0, 1.0)


def _length(x: Tensor, y: Tensor) -> Tensor:
    return torch.sqrt(x * x + y * y + 1e-9)


def _circle(x: Tensor, y: Tensor) -> Tensor:
    return _length(x, y) - 0.96


def _square(x: Tensor, y: Tensor) -> Tensor:
    return torch.maximum(x.abs(), y.abs()) - 0.84


def _triangle(x: Tensor, y: Tensor) -> Tensor:
    slope = 0.866 * x.abs() - 0.5 * (y - 0.12)
    return torch.maximum(slope, y - 0.12) - 0.56


def _star(x: Tensor, y: Tensor) -> Tensor:
    """Five points: fold into one half sector, then the line from the tip to the notch."""
    sector = 2 * math.pi / 5
    angle = torch.atan2(x, -y)
    angle = (angle - sector * torch.round(angle / sector)).abs()
    length = _length(x, y)
    tip, notch = 1.12, 0.47
    notch_x, notch_y = notch * math.sin(sector / 2), notch * math.cos(sector / 2)
    norm = math.hypot(tip - notch_y, notch_x)
    normal_x, normal_y = (tip - notch_y) / norm, notch_x / norm
    return length * torch.sin(angle) * normal_x + (length * torch.cos(angle) - tip) * normal_y


def _ring(x: Tensor, y: Tensor) -> Tensor:
    return (_length(x, y) - 0.74).abs() - 0.25


def _diamond(x: Tensor, y: Tensor) -> Tensor:
    wide, tall = 0.70, 1.10
    return (x.abs() * tall + y.abs() * wide - wide * tall) / math.hypot(wide, tall)


def _cross(x: Tensor, y: Tensor) -> Tensor:
    x, y = x.abs(), y.abs()
    return torch.maximum(torch.maximum(x, y) - 1.0, torch.minimum(x, y) - 0.33)


def _heart(x: Tensor, y: Tensor) -> Tensor:
    """Two discs on top of a square that stands on its corner."""
    scale = 0.56
    x, y = x.abs() * scale, 0.54 - y * scale
    lobe = _length(x - 0.25, y - 0.75) - math.sqrt(2.0) / 4
    corner = torch.maximum(x - y, x + y - 1.0) * math.sqrt(0.5)
    return torch.minimum(lobe, torch.maximum(corner, -y)) / scale


DISTANCES = {
    "circle": _circle,
    "square": _square,
    "triangle": _triangle,
    "star": _star,
    "ring": _ring,
    "diamond": _diamond,
    "cross": _cross,
    "heart": _heart,
}
