"""The preview of latents while they are denoised: small pictures, made without the VAE."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from chipsparse.cli.request import Request
from chipsparse.cli.views.frames import spaced
from chipsparse.layout import Grid

if TYPE_CHECKING:
    from chipsparse.pipelines.call import Pipeline

MOST_FRAMES = 3  # of a video: the first, the middle and the last
LEAST = 0.03  # of the largest variation: directions with less are left out of the map
CONTRAST = 50  # of false colours: steps of 255 for a standard deviation


class Preview:
    """Pictures of a model's latents: a linear map to colours, fitted to the last decoded clip.

    Before there is one, the three directions in which the latents vary most are shown.
    """

    def __init__(self) -> None:
        self._latents: np.ndarray | None = None
        self._map: np.ndarray | None = None  # of the channels and a one

    def pictures(
        self,
        latents: torch.Tensor | None,
        step: int,
        request: Request,
        pipe: Pipeline,
    ) -> np.ndarray | None:
        """Return pictures of the latents after a step, uint8 ``[T, H, W, 3]``; None if not known.

        In flow matching, the step's straight path is followed to where there is no noise.
        """
        config = request.model.vae_config
        channels = config.get("latent_channels") or config.get("z_dim")
        grids = [] if request.planned is None else request.planned.plan.layout.grids
        grid = grids[0] if len(grids) == 1 else None
        arranged = None if latents is None else arrange(latents[0].detach(), grid, channels)
        if arranged is None:
            return None
        before = self._latents
        sigmas = getattr(pipe.scheduler, "sigmas", None)
        after = np.nan_to_num(arranged[spaced(len(arranged), MOST_FRAMES)].float().cpu().numpy())
        self._latents = after
        if step and before is not None and sigmas is not None and max(sigmas) <= 1:
            rising = float(sigmas[0] < sigmas[-1])  # Mochi's are shares of what is clean
            noise = [abs(float(sigma) - rising) for sigma in sigmas[step : step + 2]]
            if len(set(noise)) == 2:
                after = after - noise[1] * (after - before) / (noise[1] - noise[0])
        return self.colours(after)

    def learn(self, frames: np.ndarray) -> None:
        """Fit the colours to what the VAE made of the last latents, uint8 ``[F, H, W, 3]``."""
        if self._latents is None:
            return
        times, rows, columns, _ = self._latents.shape
        pixels = torch.from_numpy(frames[spaced(len(frames), times)]).permute(0, 3, 1, 2).double()
        small = torch.nn.functional.adaptive_avg_pool2d(pixels, (rows, columns))
        colours = small.permute(0, 2, 3, 1).reshape(-1, 3).numpy()
        self._map = np.linalg.lstsq(_with_one(self._latents), colours, rcond=LEAST)[0]

    def colours(self, latents: np.ndarray) -> np.ndarray:
        """Return pictures uint8 ``[T, H, W, 3]`` of latents ``[T, H, W, C]``."""
        if self._map is not None:
            colours = _with_one(latents) @ self._map
        else:
            flat = latents.reshape(-1, latents.shape[-1])
            variances, directions = np.linalg.eigh(np.cov(flat, rowvar=False))
            largest = directions[:, -3:]
            # A direction and its opposite are one; the same picture is to have the same colours.
            signs = np.sign(largest[np.abs(largest).argmax(axis=0), range(3)])
            scale = CONTRAST * signs / np.sqrt(np.maximum(variances[-3:], 1e-6))
            colours = 128 + (flat - flat.mean(axis=0)) @ largest * scale
        return np.rint(colours.clip(0, 255)).astype(np.uint8).reshape(*latents.shape[:3], 3)


def arrange(latents: torch.Tensor, grid: Grid | None, channels: int | None) -> torch.Tensor | None:
    """Return one sample's latents as ``[T, H, W, C]``; None where their order is not known.

    They are ``[C, H, W]``, ``[C, T, H, W]``, ``[T, C, H, W]``, or tokens ``[T * H * W, C]``, of
    which some pipelines pack 2x2 latents into one.
    """
    if latents.ndim == 3:
        return latents.permute(1, 2, 0)[None]
    if latents.ndim == 4:
        frames_first = latents.shape[0] != channels and latents.shape[1] == channels
        return latents.permute(0, 2, 3, 1) if frames_first else latents.permute(1, 2, 3, 0)
    if latents.ndim != 2 or grid is None or len(latents) != math.prod(grid):
        return None
    if channels is None or latents.shape[1] != 4 * channels:
        return latents.reshape(*grid, -1)
    times, rows, columns = grid
    patches = latents.reshape(*grid, channels, 2, 2).permute(0, 1, 4, 2, 5, 3)
    return patches.reshape(times, 2 * rows, 2 * columns, channels)


def _with_one(latents: np.ndarray) -> np.ndarray:
    """Return the channels of each place and a one, ``[T * H * W, C + 1]``."""
    return np.pad(latents.reshape(-1, latents.shape[3]), ((0, 0), (0, 1)), constant_values=1)
