"""The preview of latents while they are denoised: small pictures, made without the VAE."""

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

    Before there is one, the three directions in which the latents vary most are shown.
    """

    def __init__(self) -> None:
        self._matrix: np.ndarray | None = None

    def learn(self, latents: np.ndarray, frames: np.ndarray) -> None:
        """Fit the map of latents ``[T, H, W, C]`` to uint8 ``[F, H', W', 3]`` by least squares."""
        times, rows, columns, channels = latents.shape
        inputs = _with_one(latents.reshape(-1, channels))
        pixels = torch.from_numpy(frames[spread(len(frames), times)]).permute(0, 3, 1, 2).double()
        small = torch.nn.functional.adaptive_avg_pool2d(pixels, (rows, columns))
        colours = small.permute(0, 2, 3, 1).reshape(-1, 3).numpy()
        ridge = RIDGE * len(inputs) * np.eye(channels + 1)
        self._matrix = np.linalg.solve(inputs.T @ inputs + ridge, inputs.T @ colours)

    def of(self, latents: np.ndarray) -> np.ndarray:
        """Return pictures uint8 ``[T, H, W, 3]`` of latents ``[T, H, W, C]``."""
        flat = latents.reshape(-1, latents.shape[-1])
        if self._matrix is not None and len(self._matrix) == flat.shape[1] + 1:
            colours = _with_one(flat) @ self._matrix
        else:
            centred = flat - flat.mean(axis=0)
            chosen = np.linalg.eigh(centred.T @ centred)[1][:, ::-1][:, :3]
            # A direction and its opposite are one; the same picture is to have the same colours.
            chosen = chosen * np.sign(chosen[np.abs(chosen).argmax(axis=0), range(chosen.shape[1])])
            colours = np.zeros((len(flat), 3))
            colours[:, : chosen.shape[1]] = centred @ chosen
            low, high = np.percentile(colours, [OUTLIERS, 100 - OUTLIERS], axis=0)
            colours = 255 * (colours - low) / np.maximum(high - low, 1e-6)
        return np.rint(colours.clip(0, 255)).astype(np.uint8).reshape(*latents.shape[:3], 3)


class Preview:
    """The pictures of one denoising loop.

    Args:
        grid: the transformer's tokens; tells how latents that are packed into tokens lie.
        channels: of the VAE's latents.
    """

    def __init__(self, grid: Grid | None, channels: int | None, colours: Colours) -> None:
        self._grid, self._channels, self._colours = grid, channels, colours
        self._latents: np.ndarray | None = None
        # The change of the last steps, per noise level. The median of three leaves out a step
        # where latents were also put right.
        self._slopes: deque[np.ndarray] = deque(maxlen=3)

    def pictures(
        self, latents: torch.Tensor | None, noise: tuple[float, float] | None
    ) -> np.ndarray | None:
        """Return pictures of a step's latents, uint8 ``[T, H, W, 3]``; None if not known.

        The path of the last steps is followed, as a straight line, to where there is no noise.

        Args:
            latents: at the end of a step.
            noise: levels before and after it, see `noise_levels`; None where they are not known.
        """
        arranged = None if latents is None else arrange(latents, self._grid, self._channels)
        if arranged is None:
            return None
        places = spread(len(arranged), min(MOST_FRAMES, len(arranged)))
        before, after = self._latents, np.nan_to_num(arranged[places].float().cpu().numpy())
        self._latents = after
        if before is not None and noise is not None and noise[0] != noise[1]:
            self._slopes.append((after - before) / (noise[1] - noise[0]))
            after = after - noise[1] * np.median(self._slopes, axis=0)
        return self._colours.of(after)

    def learn(self, frames: np.ndarray) -> None:
        """Teach the colours what the VAE made of the last latents, uint8 ``[F, H, W, 3]``."""
        if self._latents is not None:
            self._colours.learn(self._latents, frames)


def arrange(latents: torch.Tensor, grid: Grid | None, channels: int | None) -> torch.Tensor | None:
    """Return the first sample's latents as ``[T, H, W, C]``; None where their order is not known.

    Args:
        latents: ``[B, C, H, W]``, ``[B, C, T, H, W]``, ``[B, T, C, H, W]``, or tokens
            ``[B, T * H * W, C]``, of which some pipelines pack 2x2 latents into one.
    """
    first = latents[0].detach()
    if first.ndim == 3:
        return first.permute(1, 2, 0)[None]
    if first.ndim == 4:
        frames_first = first.shape[0] != channels and first.shape[1] == channels
        return first.permute(0, 2, 3, 1) if frames_first else first.permute(1, 2, 3, 0)
    if first.ndim != 2 or grid is None or len(first) != math.prod(grid):
        return None
    if channels is None or first.shape[1] != 4 * channels:
        return first.reshape(*grid, -1)
    times, rows, columns = grid
    patches = first.reshape(*grid, channels, 2, 2).permute(0, 1, 4, 2, 5, 3)
    return patches.reshape(times, 2 * rows, 2 * columns, channels)


def noise_levels(scheduler: Any, step: int) -> tuple[float, float] | None:
    """Return the share of noise before and after a step (from 0); None where it is not known."""
    sigmas = getattr(scheduler, "sigmas", None)
    if sigmas is None or len(sigmas) <= step + 1 or float(max(sigmas)) > 1:
        return None  # those of other schedules than flow matching are no shares
    levels = float(sigmas[step]), float(sigmas[step + 1])
    rising = sigmas[0] < sigmas[-1]  # Mochi's are shares of what is clean
    return (1 - levels[0], 1 - levels[1]) if rising else levels


def spread(count: int, few: int) -> list[int]:
    """Return so few places among so many, from the first to the last."""
    if few == 1:
        return [count // 2]
    return [round(place * (count - 1) / (few - 1)) for place in range(few)]


def _with_one(flat: np.ndarray) -> np.ndarray:
    return np.concatenate([flat, np.ones((len(flat), 1), flat.dtype)], axis=1)
