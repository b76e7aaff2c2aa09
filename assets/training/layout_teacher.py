"""What a model that draws small clips expects of the layout of larger ones, for `train_sizes.py`.

Flow matching teaches the mean of all clips that a noisy one may have been. While its layout is
open, a single clip is a poor estimate of that mean: what stands where differs from clip to clip in
thousands of tokens at once, and a step has few clips. The model knows the mean in small already. So
a larger clip is shown to it as a small one, with noise that the larger one's contains, and the
target of the larger one is moved by what the small one's prediction is off its own clip. On average
that is nothing, as long as the prediction is right and the larger clip's noise tells no more than
the small one's, so the target keeps its mean and loses what the layout varies by: a control
variate.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

# Of the small clip's noise to the mean of the larger one's. Below one, since the larger clip tells
# more than its means do.
CLEARER = 0.9


class LayoutTeacher:
    """Moves the clean latents that larger clips are to give.

    Args:
        predict: from noisy latents (B, C, f, h, w) of small clips, their noise levels (B,) and
            token ids (B, words) to velocities, noise less clip
    """

    def __init__(self, predict: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        self.predict = predict

    @torch.no_grad()
    def expected(
        self, latents: Tensor, small: Tensor, ids: Tensor, noise: Tensor, sigma: Tensor
    ) -> Tensor:
        """Float32 (B, C, F, H, W), `latents` with the layout that is to be expected.

        Args:
            latents: (B, C, F, H, W), without noise
            small: (B, C, f, h, w), of the same clips, whole numbers of times as small in height and
                width, and in frames after the first
            ids: (B, words)
            noise: (B, C, F, H, W), float32, of variance one
            sigma: (B,), of the noisy larger clips
        """
        later, small_later = latents.shape[2] - 1, small.shape[2] - 1
        times = (latents.shape[-1] // small.shape[-1], later // small_later)
        sigma = sigma.view(-1, 1, 1, 1, 1)
        shown, deviation = noise_within(noise, times)
        total = 1.0 - sigma + sigma * deviation
        noisy = ((1.0 - sigma) * small.float() + sigma * shown) / total
        level = sigma * deviation / total
        clean = noisy - level * self.predict(noisy, level.flatten(), ids).float()
        return latents.float() + enlarged(clean - small.float(), times)


def noise_within(noise: Tensor, times: tuple[int, int]) -> tuple[Tensor, float]:
    """Noise (B, C, f, h, w) of a small clip that is part of the noise of one `times` as large.

    Means of the larger one's are the sum of it and of what has nothing to do with it. The first
    frame's are of fewer numbers, so less of them is that part.

    Args:
        noise: (B, C, F, H, W), of variance one
        times: in height and width, and in frames after the first

    Returns it with its standard deviation, the same in all frames.
    """
    space, time = times
    means = torch.cat(
        [
            F.avg_pool3d(noise[:, :, :1], (1, space, space)),
            F.avg_pool3d(noise[:, :, 1:], (time, space, space)),
        ],
        dim=2,
    )
    deviation = CLEARER / (space * time**0.5)
    share = means.new_full((1, 1, means.shape[2], 1, 1), CLEARER**2)  # of the means' variance
    share[:, :, 0] /= time
    rest = torch.randn_like(means) * (deviation * (1.0 - share).sqrt())
    return share * means + rest, deviation


def enlarged(small: Tensor, times: tuple[int, int]) -> Tensor:
    """(B, C, f, h, w) to (B, C, F, H, W): bilinear, each frame but the first repeated."""
    space, time = times
    count, frames = len(small), small.shape[2]
    planes = small.transpose(1, 2).flatten(0, 1)
    planes = F.interpolate(planes, scale_factor=space, mode="bilinear")
    large = planes.unflatten(0, (count, frames)).transpose(1, 2)
    return torch.cat([large[:, :, :1], large[:, :, 1:].repeat_interleave(time, 2)], dim=2)
