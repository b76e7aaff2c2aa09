"""What the latents show while they are denoised, without the VAE: a picture of a few kilobytes.

The VAE would take seconds a step and gigabytes beside the caches; this takes a copy of three frames
of latents and a matrix product. Its parts: a guess at the denoised latents, and colours for them.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import numpy as np
import torch

from chipsparse.layout import Grid

MOST_FRAMES = 3  # of a video: the first, the middle and the last
RIDGE = 1e-3  # keeps the map of channels that hardly vary small
OUTLIERS = 2  # percent at each end that may leave the range of false colours


class Colours:
    """A linear map from latents to colours, learnt from the last clip that was decoded.

    Before there is one, the three directions in which the latents vary most are shown: false
    colours, in which shapes can be seen.
    """

    def __init__(self) -> None:
        self._matrix: np.ndarray | None = None

    def learn(self, latents: np.ndarray, frames: np.ndarray) -> None:
        """Fits the map, by least squares.

        Args:
            latents: denoised, float ``[T, H, W, C]``.
            frames: uint8 ``[F, H', W', 3]``, what the VAE made of them.
        """
        times, rows, columns = latents.shape[:3]
        inputs = _with_one(latents.reshape(-1, latents.shape[-1]))
        pixels = np.concatenate(
            [_shrunk(frames[i], rows, columns).reshape(-1, 3) for i in spread(len(frames), times)]
        )
        ridge = RIDGE * len(inputs) * np.eye(inputs.shape[1])
        self._matrix = np.linalg.solve(inputs.T @ inputs + ridge, inputs.T @ pixels)

    def of(self, latents: np.ndarray) -> np.ndarray:
        """Pictures uint8 ``[T, H, W, 3]`` of latents ``[T, H, W, C]``."""
        flat = latents.reshape(-1, latents.shape[-1])
        if self._matrix is None or len(self._matrix) != flat.shape[1] + 1:
            seen = _false_colours(flat)
        else:
            seen = _with_one(flat) @ self._matrix
        return np.rint(seen.clip(0, 255)).astype(np.uint8).reshape(*latents.shape[:3], 3)


class Preview:
    """The pictures of one denoising loop.

    Args:
        grid: the transformer's tokens; tells how latents that are packed into tokens lie.
        channels: of the VAE's latents.
    """

    def __init__(self, grid: Grid | None, channels: int | None, colours: Colours) -> None:
        self._grid, self._channels, self._colours = grid, channels, colours
        self._latents: np.ndarray | None = None
        # What the last steps changed, a unit of the noise level. The median of three leaves out a
        # step where latents were also put right.
        self._slopes: deque[np.ndarray] = deque(maxlen=3)

    def pictures(
        self, latents: torch.Tensor | None, noise: tuple[float, float] | None
    ) -> np.ndarray | None:
        """What a step's latents show, uint8 ``[T, H, W, 3]``; None where that is not known.

        The path of the last steps is followed from these latents, as a straight line over the noise
        level, to where there is no noise.

        Args:
            latents: at the end of a step.
            noise: levels before and after it, see `noise_levels`; None where they are not known.
        """
        arranged = None
        if latents is not None:
            arranged = arrange(latents, grid=self._grid, channels=self._channels)
        if arranged is None:
            return None
        before, after = self._latents, _few(arranged)
        self._latents = after
        if before is not None and noise is not None and noise[0] != noise[1]:
            self._slopes.append((after - before) / (noise[1] - noise[0]))
            after = after - noise[1] * np.median(self._slopes, axis=0)
        return self._colours.of(after)

    def learn(self, frames: np.ndarray) -> None:
        """Teaches the colours what the VAE made of the last latents, uint8 ``[F, H, W, 3]``."""
        if self._latents is not None:
            self._colours.learn(self._latents, frames)


def arrange(
    latents: torch.Tensor, *, grid: Grid | None, channels: int | None
) -> torch.Tensor | None:
    """The first sample's latents as ``[T, H, W, C]``; None where it is not known how they lie.

    Args:
        latents: ``[B, C, H, W]``, ``[B, C, T, H, W]``, ``[B, T, C, H, W]``, or tokens
            ``[B, T * H * W, C]``, of which some pipelines pack 2x2 latents into one.
    """
    if latents.ndim == 4:
        return latents[0].permute(1, 2, 0)[None]
    if latents.ndim == 5:
        frames_first = latents.shape[1] != channels and latents.shape[2] == channels
        return latents[0].permute(0, 2, 3, 1) if frames_first else latents[0].permute(1, 2, 3, 0)
    if latents.ndim != 3 or grid is None or latents.shape[1] != math.prod(grid):
        return None
    tokens = latents[0].reshape(*grid, latents.shape[2])
    if channels is None or latents.shape[2] != 4 * channels:
        return tokens
    times, rows, columns = grid
    patches = tokens.reshape(times, rows, columns, channels, 2, 2).permute(0, 1, 4, 2, 5, 3)
    return patches.reshape(times, 2 * rows, 2 * columns, channels)


def noise_levels(scheduler: Any, step: int) -> tuple[float, float] | None:
    """Before and after a step (from 0): the share of noise in the latents; None if not known."""
    sigmas = getattr(scheduler, "sigmas", None)
    if sigmas is None or len(sigmas) <= step + 1 or float(max(sigmas)) > 1:
        return None  # those of other schedules than flow matching are no shares
    levels = float(sigmas[step]), float(sigmas[step + 1])
    if sigmas[0] < sigmas[-1]:  # Mochi's are shares of what is clean
        return 1 - levels[0], 1 - levels[1]
    return levels


def spread(count: int, few: int) -> list[int]:
    """So few places among so many, from the first to the last."""
    if few == 1:
        return [count // 2]
    return [round(place * (count - 1) / (few - 1)) for place in range(few)]


def _few(latents: torch.Tensor) -> np.ndarray:
    """The frames that are shown, float32 on the host."""
    places = spread(len(latents), min(MOST_FRAMES, len(latents)))
    return np.nan_to_num(latents[places].detach().float().cpu().numpy())


def _with_one(flat: np.ndarray) -> np.ndarray:
    return np.concatenate([flat, np.ones((len(flat), 1), flat.dtype)], axis=1)


def _false_colours(flat: np.ndarray) -> np.ndarray:
    centred = flat - flat.mean(axis=0)
    _, directions = np.linalg.eigh(centred.T @ centred)  # ascending
    chosen = directions[:, ::-1][:, :3]
    # A direction and its opposite are one; the same picture is to have the same colours.
    signs = np.sign(chosen[np.abs(chosen).argmax(axis=0), range(chosen.shape[1])])
    found = np.zeros((len(flat), 3))
    found[:, : chosen.shape[1]] = centred @ (chosen * signs)
    low, high = np.percentile(found, [OUTLIERS, 100 - OUTLIERS], axis=0)
    return 255 * (found - low) / np.maximum(high - low, 1e-6)


def _shrunk(frame: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """A frame at the size of its latents, each of its pixels the mean of those it stands for."""
    pixels = torch.from_numpy(frame).permute(2, 0, 1)[None].double()
    small = torch.nn.functional.adaptive_avg_pool2d(pixels, (rows, columns))
    return small[0].permute(1, 2, 0).numpy()
