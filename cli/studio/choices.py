"""What is chosen on the page, and what is settled of it before any weight is loaded."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import torch

from chipsparse.cli.commands.studio import StudioOptions
from chipsparse.cli.options import GenerateOptions, GenerationOptions
from chipsparse.cli.progress import silent_display
from chipsparse.cli.request import Request, look_up, resolve
from chipsparse.profiles.profile import ASSETS, bundled_model

BUNDLED = (bundled_model(), ASSETS / "tiny-flux")
INDEXES = {"model_index.json", "modular_model_index.json"}


@dataclass(frozen=True, kw_only=True)
class Choices:
    """The fields of the page; None where one is empty, which leaves it to the profile.

    Attributes:
        quality: of the profile; None for one that has no qualities.
        compare: whether the dense one is made, too.
    """

    model: str
    prompt: str = ""
    seed: int = 0
    quality: str | None = None
    compare: bool = True
    height: int | None = None
    width: int | None = None
    frames: int | None = None
    steps: int | None = None
    guidance_scale: float | None = None
    negative_prompt: str | None = None

    @classmethod
    def typed(cls, options: StudioOptions, model: str) -> Choices:
        """What the page begins with."""
        names = {field.name for field in dataclasses.fields(cls)} - {"model", "prompt", "compare"}
        return cls(model=model, **{name: getattr(options, name) for name in names})


def settled(
    choices: Choices,
    folder: Path,
    *,
    typed: StudioOptions,
    device: torch.device,
    dtype: torch.dtype,
) -> Request:
    """What `generate --compare` would settle; raises `UserError`.

    Args:
        typed: at the start of the studio, which says what the page has no field for.
    """
    names = [field.name for field in dataclasses.fields(GenerationOptions)]
    chosen = {**{name: getattr(typed, name) for name in names}, **dataclasses.asdict(choices)}
    options = GenerateOptions(**chosen, output=folder / "sparse.png")
    model = look_up(options, silent_display())
    if model.accepts("num_frames"):
        options = dataclasses.replace(options, output=folder / "sparse.mp4", fps=typed.fps)
    return resolve(options.checked(), model=model, device=device, dtype=dtype)


def models_here(typed: str | None) -> list[tuple[str, str]]:
    """The models that the page offers: all that can be loaded without a download.

    Args:
        typed: as ``--model`` has it, which comes first; None where it was left out.

    Returns:
        For each a name for people, and what ``--model`` takes.
    """
    found = [] if typed is None else [(typed, typed)]
    found += [(f"{folder.name} (bundled)", str(folder)) for folder in BUNDLED]
    return [*found, *((name, name) for name in _cached() if name != typed)]


def _cached() -> list[str]:
    """Hub names of pipelines in Hugging Face's cache; nothing where there is none."""
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:
        return []
    return sorted(
        each.repo_id
        for each in repositories
        if each.repo_type == "model"
        and any(file.file_name in INDEXES for kept in each.revisions for file in kept.files)
    )
