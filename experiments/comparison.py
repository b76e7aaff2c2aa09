"""The closeness of a clip to a reference, frame by frame, and the bounds that it may have to keep.

Unlike `chipsparse.experiments.records.ClipQuality`, which files hold, identical pixels have an
infinite PSNR here, and each frame is an object.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal, NamedTuple

from chipsparse.experiments.records import ClipQuality

STEPS = 255.0  # of an 8-bit value
MetricName = Literal["psnr", "ssim", "lpips", "max_pixel", "flicker_change"]


@dataclass(frozen=True)
class FrameComparison:
    """One frame of clip B against the same frame of clip A.

    Attributes:
        frame: Its number in the clip, from 0.
        psnr: Peak signal-to-noise ratio in dB; infinite where all pixels are the same.
        max_pixel: The largest difference of any channel of any pixel, 0 to 255.
        ssim: Structural similarity, 1 where all pixels are the same. None where a side is
            shorter than 11 pixels.
        lpips: Perceptual distance, from 0. None where it was not measured.
        flicker: How much this frame of B differs from the mean of its two neighbours, as twice
            the mean absolute difference, in steps of 1/255. None for the first and the last frame.
        flicker_a: The same of A.
    """

    frame: int
    psnr: float
    max_pixel: int
    ssim: float | None = None
    lpips: float | None = None
    flicker: float | None = None
    flicker_a: float | None = None

    @property
    def flicker_change(self) -> float | None:
        """Flicker of B minus that of A, in steps of 1/255; None where a neighbour is missing."""
        if self.flicker is None or self.flicker_a is None:
            return None
        return self.flicker - self.flicker_a


@dataclass(frozen=True)
class ClipComparison:
    """Clip B against clip A, both uint8 ``[F, H, W, 3]``; what `chipsparse.compare` returns.

    Attributes:
        identical: All pixels of all frames are the same.
        psnr: Peak signal-to-noise ratio in dB, of the error of the whole clip; infinite where
            the clips are identical.
        max_pixel: The largest difference of any channel of any pixel, 0 to 255.
        ssim: Structural similarity, the mean over frames. None where a side is shorter than 11.
        lpips: Perceptual distance, the mean over frames. None where it was not measured.
        flicker: Flicker of B, the mean over frames, in steps of 1/255. None below 3 frames.
        flicker_a: The same of A.
        height: Pixels of a frame from top to bottom.
        width: Pixels of a frame from left to right.
        frames: Each of the F frames, in order.
    """

    identical: bool
    psnr: float
    max_pixel: int
    ssim: float | None
    lpips: float | None
    flicker: float | None
    flicker_a: float | None
    height: int
    width: int
    frames: tuple[FrameComparison, ...]

    @property
    def flicker_change(self) -> float | None:
        """Flicker of B minus that of A, in steps of 1/255; None below 3 frames."""
        if self.flicker is None or self.flicker_a is None:
            return None
        return self.flicker - self.flicker_a

    @property
    def worst(self) -> FrameComparison:
        """The frame with the lowest PSNR; the first of several."""
        return min(self.frames, key=lambda frame: frame.psnr)

    def worst_by(self, metric: MetricName) -> FrameComparison | None:
        """Return the frame in which a metric is farthest from A; None where it was not measured."""
        known = [frame for frame in self.frames if getattr(frame, metric) is not None]
        if not known:
            return None
        if metric in ("psnr", "ssim"):
            return min(known, key=lambda frame: float(getattr(frame, metric)))
        return max(known, key=lambda frame: abs(float(getattr(frame, metric))))


def comparison_of(quality: ClipQuality, height: int, width: int) -> ClipComparison:
    """Return a comparison from the record of one whose frames were kept."""
    curves = quality.per_frame
    missing: list[float | None] = [None] * len(quality.psnrs)

    def steps(value: float | None) -> float | None:
        return None if value is None else STEPS * value

    columns = zip(
        quality.psnrs,
        curves["largest_difference"],
        curves.get("ssim", missing),
        curves.get("lpips", missing),
        map(steps, curves.get("flicker", missing)),
        map(steps, curves.get("flicker_dense", missing)),
        strict=True,
    )
    frames = tuple(
        FrameComparison(number, psnr, int(pixel or 0), *others)
        for number, (psnr, pixel, *others) in enumerate(columns)
    )
    flicker = steps(quality.flicker)
    change = steps(quality.flicker_change)
    return ClipComparison(
        identical=quality.identical,
        psnr=math.inf if quality.psnr_db is None else quality.psnr_db,
        max_pixel=quality.largest_difference,
        ssim=quality.ssim,
        lpips=quality.lpips,
        flicker=flicker,
        flicker_a=None if flicker is None or change is None else flicker - change,
        height=height,
        width=width,
        frames=frames,
    )


# Bounds.


class Broken(NamedTuple):
    """A bound that does not hold: the frame that is farthest beyond it, and a sentence."""

    bound: str  # its name, such as ``min_psnr``
    frame: int
    text: str


class Measured(NamedTuple):
    """How a bound reads its metric."""

    metric: MetricName
    title: str
    unit: str
    is_least: bool  # a lower bound


BOUNDS = {
    "min_psnr": Measured("psnr", "PSNR", " dB", True),
    "min_ssim": Measured("ssim", "SSIM", "", True),
    "max_lpips": Measured("lpips", "LPIPS", "", False),
    "max_pixel": Measured("max_pixel", "largest pixel difference", " of 255", False),
    "max_flicker": Measured("flicker_change", "flicker change", " of 255", False),
}


@dataclass(frozen=True)
class Bounds:
    """What every frame of a clip must keep; None where there is no such bound.

    Attributes:
        min_psnr: Least PSNR in dB, above 0.
        min_ssim: Least SSIM, from 0 to 1.
        max_lpips: Largest LPIPS, from 0.
        max_pixel: Largest difference of any channel of any pixel, 0 to 255.
        max_flicker: Largest change of the flicker, up or down, in steps of 1/255.
    """

    min_psnr: float | None = None
    min_ssim: float | None = None
    max_lpips: float | None = None
    max_pixel: float | None = None
    max_flicker: float | None = None

    def __post_init__(self) -> None:
        for name, value in self.given.items():
            most = {"min_ssim": 1.0, "max_pixel": STEPS}.get(name, math.inf)
            if not 0 <= value <= most:
                limit = "" if math.isinf(most) else f" to {most:g}"
                raise ValueError(f"{name} must be from 0{limit or ' on'}, got {value}")

    @property
    def given(self) -> dict[str, float]:
        """The bounds that there are, by name."""
        pairs = ((item.name, getattr(self, item.name)) for item in fields(self))
        return {name: value for name, value in pairs if value is not None}

    @property
    def text(self) -> str:
        """The bounds for people, such as ``PSNR >= 30 dB``."""
        return ", ".join(map(self._text, self.given))

    def broken(self, found: ClipComparison) -> list[Broken]:
        """Return the bounds that a frame breaks, none where all hold.

        Raises `ValueError` where a bound is on a metric that was not measured, but for flicker,
        which clips of fewer than three frames do not have.
        """
        beyond = []
        for name, bound in self.given.items():
            read = BOUNDS[name]
            worst = found.worst_by(read.metric)
            if worst is None and name == "max_flicker":
                continue
            if worst is None:
                raise ValueError(f"{name} {bound:g}: {read.title} was not measured")
            value = abs(float(getattr(worst, read.metric)))
            if not (value >= bound if read.is_least else value <= bound):
                text = f"{read.title} {value:.4g}{read.unit} in frame {worst.frame}"
                beyond.append(Broken(name, worst.frame, f"{text} breaks {self._text(name)}"))
        return beyond

    def _text(self, name: str) -> str:
        read = BOUNDS[name]
        sign = ">=" if read.is_least else "<="
        return f"{read.title} {sign} {self.given[name]:g}{read.unit}"
