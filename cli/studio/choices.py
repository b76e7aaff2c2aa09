"""What is chosen on the page, and what is settled of it before any weight is loaded."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import torch

from chipsparse.cli.commands.generate import GenerateOptions
from chipsparse.cli.commands.studio import StudioOptions
from chipsparse.cli.generate.prepared import Job, settle
from chipsparse.cli.generation_options import GenerationOptions
from chipsparse.cli.planning.request import look_up
from chipsparse.cli.progress import silent_display


@dataclass(frozen=True, kw_only=True)
class Choices:
    """The fields of the page; None where one is empty, which leaves it to the profile.

    Attributes:
        model: folder or hub name.
        prompt: what to show.
        seed: of the noise.
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
        """What the page begins with.

        Args:
            options: what the user typed.
            model: folder or hub name.
        """
        names = {field.name for field in dataclasses.fields(cls)} - {"model", "prompt", "compare"}
        return cls(model=model, **{name: getattr(options, name) for name in names})


def settled(
    typed: StudioOptions, choices: Choices, folder: Path, device: torch.device, dtype: torch.dtype
) -> Job:
    """What `generate --compare` would settle; raises `UserError`.

    Args:
        typed: at the start of the studio, which also says what the page has no field for.
        choices: take the place of those.
        folder: for the clip.
        device: to compute on.
        dtype: to compute in.
    """
    names = [field.name for field in dataclasses.fields(GenerationOptions)]
    chosen = {**{name: getattr(typed, name) for name in names}, **dataclasses.asdict(choices)}
    options = GenerateOptions(**chosen, output=folder / "sparse.png", fps=typed.fps)
    model = look_up(options, silent_display())
    if model.accepts("num_frames"):
        options = dataclasses.replace(options, output=folder / "sparse.mp4")
    options.check()
    return settle(options, model, device, dtype)
