"""A model's own files, and what they tell before PyTorch and diffusers are imported."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from chipsparse.common.errors import UserError, first_line, user_errors
from chipsparse.pipelines.model_sizes import vae_factors
from chipsparse.profiles.profile import Medium, bundled_model, medium_of, profile_classes

HUB_NAME = re.compile(r"([^/.~][^/]*)/[^/]+")  # and its owner
HUB_SECONDS = 6.0  # to wait for a first answer
INDEX = "model_index.json"
MODULAR_INDEX = "modular_model_index.json"


@dataclass(frozen=True)
class ModelFolder:
    """The configs of a plain pipeline on this machine, without the defaults of its classes."""

    location: str
    transformer_class: str
    transformer_config: dict[str, Any]
    vae_config: dict[str, Any]

    @property
    def medium(self) -> Medium | None:
        """The medium that the model makes; None where no bundled profile tells."""
        known = self.transformer_class in profile_classes()
        return medium_of(self.transformer_class) if known else None

    @property
    def tells_sizes(self) -> bool:
        """True where the configs hold what decides about sizes, so that no default counts."""
        try:
            return "patch_size" in self.transformer_config and vae_factors(self.vae_config)[0] > 1
        except (LookupError, TypeError, ValueError):
            return False


def read_folder(location: str | None) -> ModelFolder | None:
    """Return what the folder of a model tells; ``location`` None: that of the bundled one.

    Returns None for a model on the hub, a modular pipeline, and what only diffusers can judge.
    Raises `UserError` where a file is missing or no JSON.
    """
    folder = bundled_model() if location is None else Path(location).expanduser()
    if not folder.exists():
        return None
    index = read_index(str(folder))
    components = components_of(index)
    transformers = sorted(name for name in components if name.startswith("transformer"))
    if is_modular(index) or not transformers:
        return None
    check_complete(str(folder), absent_components(str(folder), components))
    read = [folder / name / "config.json" for name in (transformers[0], "vae")]
    if not all(file.is_file() for file in read):
        return None
    transformer_config, vae_config = (
        read_json(str(folder), str(file.relative_to(folder))) for file in read
    )
    transformer_class = str(components[transformers[0]][1])
    return ModelFolder(str(folder), transformer_class, transformer_config, vae_config)


def is_modular(index: dict[str, Any]) -> bool:
    """Return whether an index is that of a modular pipeline."""
    return "_blocks_class_name" in index


def components_of(index: dict[str, Any]) -> dict[str, list[Any]]:
    """Return the components that are there by name: library, class, and of modular ones a place."""
    length = 3 if is_modular(index) else 2
    return {
        name: entry
        for name, entry in index.items()
        if isinstance(entry, list) and len(entry) == length and entry[1] is not None
    }


def absent_components(location: str, components: Iterable[str]) -> list[str]:
    """Return the names of components that have no folder; of a model on the hub, none."""
    folder = Path(location)
    return [name for name in components if folder.exists() and not (folder / name).is_dir()]


def check_complete(location: str, absent: list[str]) -> None:
    """Raise `UserError` where components are absent."""
    if absent:
        raise UserError(
            f"the model {location} is incomplete: {INDEX} names {absent[0]}, but there is no "
            f"folder {Path(location) / absent[0]}",
        )


def read_index(location: str) -> dict[str, Any]:
    """Return the content of the model's index, or of that of a modular pipeline."""
    try:
        return read_json(location, INDEX)
    except UserError:
        with suppress(UserError):
            return read_json(location, MODULAR_INDEX)
        raise


def read_json(location: str, name: str) -> dict[str, Any]:
    """Return the content of one of a model's files; raise `UserError` for what is wrong with it."""
    file = Path(location) / name
    if not Path(location).exists():
        file = _fetch(location, name)
    elif not file.is_file():
        raise UserError(f"{location} is not a diffusers model folder: it has no {name}")
    with user_errors(OSError, ValueError, what=f"{file} is not valid JSON"):
        content = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise UserError(f"{file} must hold a JSON object, not a {type(content).__name__}")
    return content


def _fetch(hub_name: str, name: str) -> Path:
    from huggingface_hub import errors, hf_hub_download

    try:
        return Path(hf_hub_download(hub_name, name, local_files_only=not hub_answers()))
    except Exception as error:
        reasons = {
            errors.LocalEntryNotFoundError: "no connection to it, and no copy in the cache",
            errors.GatedRepoError: "accept the terms of the model there, and log in",
            errors.RepositoryNotFoundError: "it has no such model, or a private one",
            errors.EntryNotFoundError: f"the model has no {name}",
            Exception: first_line(error),
        }
        why = next(text for kind, text in reasons.items() if isinstance(error, kind))
        raise UserError(
            f"{hub_name} is neither a folder here nor a model that could be fetched from the "
            f"Hugging Face hub: {why}",
        ) from error


@cache
def hub_answers() -> bool:
    """Return whether the Hugging Face hub answered within `HUB_SECONDS`, asked once in a process.

    Without a network, its client tries again and again, a minute and more for each file.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if constants.HF_HUB_OFFLINE:
        return False
    answers: list[Any] = []

    def ask() -> None:
        with suppress(Exception):
            answers.append(get_session().head(constants.ENDPOINT, timeout=HUB_SECONDS))

    # In a thread, as the look-up of the host's name has no limit of its own.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(HUB_SECONDS)
    return len(answers) > 0


def from_cache(location: str) -> dict[str, bool]:
    """Return the option with which a class of diffusers does not ask a hub that never answers."""
    return {} if Path(location).exists() or hub_answers() else {"local_files_only": True}
