"""`--lora`: adapters that are loaded beside a model's weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from chipsparse.cli.errors import UserError, check_installed, user_errors
from chipsparse.pipelines.model_files import HUB_NAME, hub_answers

SUFFIX = ".safetensors"


@dataclass(frozen=True)
class Lora:
    """One adapter."""

    file: Path
    scale: float


def read_lora(text: str) -> Lora:
    """Return the LoRA of ``PATH`` or ``PATH:SCALE``; load nothing into a model.

    The path is a file, a folder with one, or a hub name, whose file is fetched. Raises `UserError`
    where there is none, or the package for it is missing.
    """
    path, behind = _parts(text)
    try:
        scale = 1.0 if behind is None else float(behind)
    except ValueError as error:
        raise UserError(
            f"--lora {text}: {behind!r} is no number; write PATH or PATH:SCALE",
        ) from error
    if not math.isfinite(scale):
        raise UserError(f"--lora {text}: the scale must be a finite number")
    file = _file(path)
    with (
        user_errors(OSError, SafetensorError, what=f"--lora {file} cannot be read"),
        safe_open(file, framework="numpy") as opened,
    ):
        names = list(opened.keys())
    if not any("lora" in name.lower() for name in names):
        raise UserError(f"--lora {file} holds no LoRA: none of its tensors is named so")
    check_installed("peft", "lora", "--lora needs the Python package peft")
    return Lora(file, scale)


def lora_anywhere(text: str) -> str:
    """Return ``PATH:SCALE`` with a path that holds in every folder; a hub name stays."""
    path, behind = _parts(text)
    if not path.exists():
        return text
    scale = "" if behind is None else f":{behind}"
    return f"{path.absolute()}{scale}"


def _parts(text: str) -> tuple[Path, str | None]:
    """Return the path and the scale of ``PATH[:SCALE]``; a file may have a colon in its name."""
    whole = Path(text).expanduser()
    before, colon, behind = text.rpartition(":")
    if not colon or whole.exists():
        return whole, None
    return Path(before).expanduser(), behind


def load_loras(pipe: Any, loras: list[Lora]) -> None:
    """Load all of them and make them active; raise `UserError` for one of another model."""
    if not hasattr(pipe, "load_lora_weights"):
        raise UserError(f"{type(pipe).__name__} takes no LoRA; leave --lora out")
    names = [f"lora_{number}" for number in range(len(loras))]
    for name, lora in zip(names, loras, strict=True):
        with user_errors(Exception, what=f"--lora {lora.file} could not be loaded into this model"):
            pipe.load_lora_weights(
                str(lora.file.parent),
                weight_name=lora.file.name,
                adapter_name=name,
            )
        # Weights whose names the model does not know are passed over with a warning alone.
        if not any(name in loaded for loaded in pipe.get_list_adapters().values()):
            raise UserError(f"--lora {lora.file} is of another model: none of its weights fit")
    pipe.set_adapters(names, [lora.scale for lora in loras])


def _file(path: Path) -> Path:
    if not path.exists():
        owner = HUB_NAME.fullmatch(str(path))
        if owner is not None and path.suffix != SUFFIX and not Path(owner[1]).is_dir():
            return _fetched(str(path))
        raise UserError(
            f"--lora {path} does not exist; name a file or folder on this machine, or one of the "
            "Hugging Face hub as owner/name",
        )
    if not path.is_dir():
        if path.suffix != SUFFIX:
            raise UserError(f"--lora {path} must end in {SUFFIX}")
        return path
    files = sorted(path.glob(f"*{SUFFIX}"))
    _check_one(path, [file.name for file in files])
    return files[0]


def _fetched(hub_name: str) -> Path:
    """Return the file of a hub name, out of the cache where the hub does not answer."""
    from huggingface_hub import list_repo_files, snapshot_download

    online = hub_answers()
    what = f"--lora {hub_name} is not here and could not be fetched from the Hugging Face hub"
    with user_errors(Exception, what=what):
        if online:  # a whole model, which has many files, is not fetched
            names = [name for name in list_repo_files(hub_name) if name.endswith(SUFFIX)]
            _check_one(hub_name, names)
        folder = snapshot_download(
            hub_name,
            allow_patterns=f"*{SUFFIX}",
            local_files_only=not online,
        )
    return _file(Path(folder))


def _check_one(place: Path | str, names: list[str]) -> None:
    if len(names) != 1:
        held = ", ".join(names) or "none"
        raise UserError(f"--lora {place} must hold one {SUFFIX} file, or name it; it holds {held}")
