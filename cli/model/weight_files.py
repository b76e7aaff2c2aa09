"""Whether a model's weights are all there and those of its configs, and which ones they are.

Only the headers and the ends of the files are read. Without this, diffusers loads a transformer
whose config names another number of layers than its weights have, and makes a wrong result.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from chipsparse.cli.errors import UserError, user_errors
from chipsparse.cli.model.dense_layers import QUANTIZED
from chipsparse.cli.model.description import ModelDescription
from chipsparse.cli.model.weights import component_class, made_from
from chipsparse.cli.wording import counted

WEIGHTS = (".safetensors", ".bin", ".pt")
INCOMPLETE = "incomplete download?"
SAMPLED_BYTES = 1 << 16  # of each weights file's end, where its last tensor is


def check_weight_files(model: ModelDescription, folder: Path) -> None:
    """Raises `UserError` for weights that are missing, damaged, or of another config."""
    for name, (library, class_name) in model.components.items():
        found = component_class(library, class_name)
        if found is None:
            continue
        files = _weight_files(folder / name, f"the {name} of the model {model.location}")
        shapes: dict[str, tuple[int, ...]] = {}
        for file in files:
            shapes |= _shapes(file)
        if name.startswith("transformer") and shapes:
            _check_config(found, folder / name, shapes)


def _weight_files(folder: Path, whose: str) -> list[Path]:
    """The safetensors files of a component, if it has some; pickled weights cannot be looked into.

    Raises:
        UserError: there are no weights, or not all of those that an index names.
    """
    files = sorted(file for file in folder.iterdir() if file.suffix in WEIGHTS)
    if not files:
        raise UserError(
            f"{whose} has no weights: there is no .safetensors file in {folder} ({INCOMPLETE})"
        )
    for index in sorted(folder.glob("*.safetensors.index.json")):
        missing = sorted(_indexed(index) - {file.name for file in files})
        if missing:
            raise UserError(f"{whose} has no {missing[0]}, which {index.name} names ({INCOMPLETE})")
    return [file for file in files if file.suffix == ".safetensors"]


def _indexed(index: Path) -> set[str]:
    wrong = (OSError, ValueError, KeyError, AttributeError)
    with user_errors(*wrong, what=f"{index} is damaged ({INCOMPLETE})"):
        return set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())


def _shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor in a file."""
    from safetensors import SafetensorError, safe_open

    with (
        user_errors(OSError, SafetensorError, what=f"{file} is damaged ({INCOMPLETE})"),
        safe_open(file, framework="numpy") as opened,
    ):
        return {
            name: tuple(opened.get_slice(name).get_shape())
            for name in opened.keys()  # noqa: SIM118 (it is no mapping)
        }


def _check_config(found: Any, folder: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """Raises `UserError` where a config and its weights are of different models."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if QUANTIZED in config:
        return  # its tensors have other names and shapes
    what = f"{folder / 'config.json'} makes no {found.__name__}"
    with user_errors(Exception, what=what), torch.device("meta"):
        made = made_from(found, config)
    wanted = {name: tuple(tensor.shape) for name, tensor in made.state_dict().items()}
    ignored = getattr(found, "_keys_to_ignore_on_load_unexpected", None) or ()
    unexpected = [
        name
        for name in shapes
        if name not in wanted and not any(re.search(each, name) for each in ignored)
    ]
    missing = [name for name in wanted if name not in shapes]
    others = [name for name in wanted if name in shapes and wanted[name] != shapes[name]]
    for names, what in (
        (missing, "asks for {} more than are there"),
        (unexpected, "has no place for {} that are there"),
        (others, "asks for other shapes of {}"),
    ):
        if names:
            fault = what.format(counted(len(names), "tensor"))
            raise UserError(
                f"{folder / 'config.json'} does not fit the weights beside it: it {fault}, such as "
                f"{names[0]}"
            )


def weights_digest(model: ModelDescription) -> str | None:
    """Tells the weights in a folder from others; None for a hub model, which its name tells."""
    folder = Path(model.location)
    if not folder.is_dir():
        return None
    return files_digest(file for file in folder.glob("*/*") if file.suffix in WEIGHTS)


def files_digest(files: Iterable[Path]) -> str:
    """Tells files of weights from others, by their names, sizes and ends."""
    found = hashlib.sha256()
    for file in sorted(files):
        size = file.stat().st_size
        with file.open("rb") as stream:
            stream.seek(max(0, size - SAMPLED_BYTES))
            found.update(f"{file.parent.name}/{file.name} {size}".encode() + stream.read())
    return found.hexdigest()[:12]
