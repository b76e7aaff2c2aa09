"""The generation that a tuned profile was measured with, compared with another one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from chipsparse.common.validation import Validated, option


@dataclass(frozen=True, repr=False)
class TunedTarget(Validated):
    """The target of tuning; it has one of these at least."""

    min_psnr_db: float | None = option(None, "on every held-out prompt, against dense", minimum=0.0)
    min_ssim: float | None = option(None, "likewise", minimum=0.0, maximum=1.0)
    max_lpips: float | None = option(None, "likewise", minimum=0.0)
    min_speedup: float | None = option(None, "dense over sparse median generation", minimum=0.0)
    max_seconds: float | None = option(None, "median generation", minimum=0.0)


@dataclass(frozen=True, repr=False)
class TunedMeasurement(Validated):
    """The measurements on held-out prompts, each sparse against dense with the same seed."""

    prompts: int = option(0, "how many", minimum=0)
    psnr_db_worst: float | None = option(None, "smallest; null: equal outputs")
    psnr_db_median: float | None = option(None, "median; null: equal outputs")
    ssim_worst: float | None = option(None, "smallest; null: frames too small for it")
    lpips_worst: float | None = option(None, "largest; null: not measured")
    seconds: float = option(0.0, "median generation, text and decoding included", minimum=0.0)
    dense_seconds: float = option(0.0, "the same, dense", minimum=0.0)

    @property
    def speedup(self) -> float:
        """The dense over the sparse median; 0 where it is not known."""
        return self.dense_seconds / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, repr=False)
class TunedFor(Validated):
    """The range of a profile that `chipsparse tune` wrote; nothing of it changes what is computed.

    Outside of it neither quality nor speed was measured.
    """

    model: str = option("", "folder or hub name")
    transformer_config: str = option("", "digest of the transformer's config")
    height: int | None = option(None, "pixels", minimum=1)
    width: int | None = option(None, "pixels", minimum=1)
    num_frames: int | None = option(None, "frames of the video", minimum=1)
    num_inference_steps: int | None = option(None, "denoising steps", minimum=1)
    guidance_scale: float | None = option(None, "as in generation")
    true_cfg_scale: float | None = option(None, "as in generation")
    flow_shift: float | None = option(
        None,
        "of the scheduler, as --flow-shift; null: its own",
        minimum=0.0,
    )
    dtype: str = option("", "of the weights")
    device: str = option("", "where it was measured")
    versions: dict[str, Any] | None = option(None, "of chipsparse, PyTorch and diffusers")
    target: TunedTarget = option(TunedTarget(), "what was asked for")
    measured: TunedMeasurement = option(TunedMeasurement(), "on held-out prompts")


RANGE = {  # fields of `TunedFor` that a generation has too, and what people call them
    "height": "a height of {} pixels",
    "width": "a width of {} pixels",
    "num_frames": "{} frames",
    "num_inference_steps": "{} steps",
    "guidance_scale": "guidance {}",
    "true_cfg_scale": "true guidance {}",
    "flow_shift": "a flow shift of {}",
    "dtype": "{}",
    "device": "{}",
}


def outside(tuned: TunedFor, generation: Mapping[str, Any]) -> list[str]:
    """Return how a generation differs from the tuned one, a phrase for each difference.

    Its values go by the names of `RANGE` and ``transformer_config``; those left out are not
    compared.
    """
    differences = []
    if generation.get("transformer_config", tuned.transformer_config) != tuned.transformer_config:
        differences.append(f"another model than {tuned.model}")
    for name, phrase in RANGE.items():
        values = generation.get(name, getattr(tuned, name)), getattr(tuned, name)
        if values[0] != values[1]:
            unset = "the scheduler's own" if name == "flow_shift" else "none"
            given, expected = (unset if value is None else value for value in values)
            differences.append(f"{phrase.format(given)}, not {expected}")
    return differences


TARGETS = {
    "min_psnr_db": "a PSNR of at least {:g} dB",
    "min_ssim": "an SSIM of at least {:g}",
    "max_lpips": "an LPIPS of at most {:g}",
    "min_speedup": "at least {:g} times the speed",
    "max_seconds": "at most {:g} s",
}


def target_text(target: Mapping[str, float | None]) -> str:
    """Return a target in words, from the fields of a `TunedTarget`."""
    asked = [text.format(target[name]) for name, text in TARGETS.items() if target.get(name)]
    return " and ".join(asked)


def digest(config: Mapping[str, Any]) -> str:
    """Return a short name of a transformer's config, whatever version of diffusers wrote it."""
    own = {name: value for name, value in config.items() if not name.startswith("_")}
    text = json.dumps(own, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
