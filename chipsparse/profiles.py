"""Profiles: a sparsity config with the generation settings it was made for, as one YAML file.

A profile is found by the transformer's class in ``assets/profiles``, unless the model's folder
brings its own ``chipsparse.yaml``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from chipsparse.config import SparsityConfig
from chipsparse.tuned_range import TunedFor
from chipsparse.validation import Validated, build, option

ASSETS = Path(__file__).parent / "assets"
MODEL_PROFILE_NAME = "chipsparse.yaml"


@dataclass(frozen=True)
class GenerationDefaults(Validated):
    """Settings of the pipeline call that the profile is meant for; null: the pipeline's own."""

    height: int | None = option(None, "height in pixels", minimum=1)
    width: int | None = option(None, "width in pixels", minimum=1)
    num_frames: int | None = option(None, "frames of the video", minimum=1)
    num_inference_steps: int | None = option(None, "denoising steps", minimum=1)
    guidance_scale: float | None = option(
        None,
        "classifier-free guidance, or the strength that a guidance-distilled model is told",
        minimum=0.0,
    )
    true_cfg_scale: float | None = option(
        None,
        "classifier-free guidance of pipelines that give guidance_scale another meaning (FLUX)",
        minimum=0.0,
    )
    max_sequence_length: int | None = option(None, "text tokens, padding included", minimum=1)


@dataclass(frozen=True)
class _ProfileFile(Validated):
    model_class: str = option("", "class of the transformer, such as WanTransformer3DModel")
    description: str = option("", "what the profile is for and what was measured")
    generation: GenerationDefaults = option(GenerationDefaults(), "settings of the pipeline call")
    sparsity: SparsityConfig = option(SparsityConfig(), "what is computed")
    tuned: TunedFor | None = option(None, "what it was tuned for and measured with")


@dataclass(frozen=True)
class Profile:
    """A loaded profile.

    Attributes:
        model_class: the transformer class that it is for.
        description: one sentence for people.
        generation: settings of the pipeline call.
        sparsity: what is computed.
        source: the file it came from.
        tuned: what it was tuned for; None where people wrote it.
    """

    model_class: str
    description: str
    generation: GenerationDefaults
    sparsity: SparsityConfig
    source: str
    tuned: TunedFor | None = None


def load_profile(path: Path | str) -> Profile:
    """Reads a profile.

    Raises:
        ValueError: if the file is missing, is not YAML, or has an unknown or ill-typed field; the
            message names the file, the field's path and what is allowed.
    """
    try:
        data: Any = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot read the profile ({error.strerror})") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        first = " ".join(str(error).split())
        raise ValueError(f"{path}: not valid YAML ({first})") from None
    try:
        parsed = build(_ProfileFile, {} if data is None else data)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return Profile(
        parsed.model_class,
        parsed.description,
        parsed.generation,
        parsed.sparsity,
        str(path),
        parsed.tuned,
    )


def find_profile(model_folder: Path | str | None, transformer_class: str) -> Profile:
    """The profile of a model: its folder's own, else that of its transformer class.

    Raises:
        ValueError: if there is neither, or the file is bad.
    """
    own = None if model_folder is None else Path(model_folder) / MODEL_PROFILE_NAME
    if own is not None and own.is_file():
        return load_profile(own)
    by_class = {path.stem: path for path in sorted((ASSETS / "profiles").glob("*.yaml"))}
    if transformer_class not in by_class:
        raise ValueError(
            f"no profile for the model class {transformer_class}; "
            f"known classes: {', '.join(by_class)}"
        )
    return load_profile(by_class[transformer_class])


def bundled_model() -> Path:
    """The folder of the bundled tiny video model."""
    return ASSETS / "tiny-wan"
