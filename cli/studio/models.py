"""The models that the page offers: all that can be loaded without a download."""

from __future__ import annotations

from dataclasses import dataclass

from chipsparse.profiles.profile import ASSETS, bundled_model

BUNDLED = (bundled_model(), ASSETS / "tiny-flux")
INDEXES = {"model_index.json", "modular_model_index.json"}


@dataclass(frozen=True)
class Model:
    """One of them.

    Attributes:
        location: as ``--model`` takes it.
        name: for people.
    """

    location: str
    name: str


def models_here(typed: str | None) -> list[Model]:
    """What was typed first, then the bundled ones and those of the hub's cache."""
    found = [] if typed is None else [Model(typed, typed)]
    found += [Model(str(folder), f"{folder.name} (bundled)") for folder in BUNDLED]
    return [*found, *(Model(name, name) for name in _cached() if name != typed)]


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
