"""What the files of a model's folder tell before PyTorch and diffusers are imported."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chipsparse.profiles.profile import (
    BUNDLED_MODELS,
    Medium,
    bundled_model,
    medium_of,
    profile_classes,
)

INDEX = "model_index.json"


@dataclass(frozen=True)
class ModelFolder:
    """The index of a plain pipeline on this machine, with the configs that decide about sizes."""

    path: Path
    transformer_class: str
    transformer_config: dict[str, Any]  # as in the file, without the class's defaults
    vae_config: dict[str, Any]  # likewise

    @property
    def medium(self) -> Medium | None:
        """What the model makes; None where no bundled profile tells."""
        known = self.transformer_class in profile_classes()
        return medium_of(self.transformer_class) if known else None


def read_folder(location: str | None) -> ModelFolder | None:
    """Return what a model's folder tells; None: the bundled one.

    Returns None for a model on the hub, and for a folder in which anything is not as usual: what is
    wrong with it is said once diffusers can be asked.
    """
    path = Path(bundled_model(BUNDLED_MODELS[0]) if location is None else location).expanduser()
    try:
        index = _read(path / INDEX)
        transformer = min(name for name in index if name.startswith("transformer"))
        _, transformer_class = index[transformer]
        return ModelFolder(
            path,
            str(transformer_class),
            _read(path / transformer / "config.json"),
            _read(path / "vae" / "config.json"),
        )
    except (OSError, ValueError, TypeError):
        return None


def _read(file: Path) -> dict[str, Any]:
    """Return a JSON object; raise `OSError`, `ValueError` or `TypeError`."""
    return dict(json.loads(file.read_text(encoding="utf-8")))
