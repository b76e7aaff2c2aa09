"""Whether a model's weights are all there and those of its configs, and which ones they are.

Without this, diffusers loads a transformer whose config names another number of layers than its
weights have, and makes a wrong result.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from chipsparse.cli.errors import UserError, user_errors
from chipsparse.cli.model.dense_layers import QUANTIZED
from chipsparse.cli.model.description import ModelDescription
from chipsparse.cli.model.weights import component_class, made_from
from chipsparse.cli.wording import counted

WEIGHTS = (".safetensors", ".bin", ".pt")
INCOMPLETE = "incomplete download?"
SAMPLED_BYTES = 1 << 12  # of either end of a tensor
CHUNK_BYTES = 1 << 20
MOST_HEADER_BYTES = 100_000_000  # of a safetensors file, as its library has it


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
    """Tells a model's folder from others by what is loaded of it: weights, configs, tokenizers.

    Neither its name nor its times count. None for a hub model, which its name tells.
    """
    folder = Path(model.location)
    if not folder.is_dir():
        return None
    files = list(folder.glob("*model_index.json"))
    for name in model.components:
        files += (file for file in (folder / name).rglob("[!.]*") if file.is_file())
    return files_digest({file.relative_to(folder).as_posix(): file for file in files})


def files_digest(files: Mapping[str, Path]) -> str:
    """Tells files from others, by the names that they are given and by their contents.

    Of safetensors the header and both ends of every tensor are read, of others everything. Raises
    `UserError` for what cannot be read.
    """
    found = hashlib.blake2b(digest_size=6)
    for name, file in sorted(files.items()):
        with user_errors(OSError, what=f"{file} cannot be read"), file.open("rb") as stream:
            size = file.stat().st_size
            found.update(os.fsencode(f"{name} {size}\n"))
            for begin, end in _sampled(stream, size):
                stream.seek(begin)
                while begin < end and (part := stream.read(min(CHUNK_BYTES, end - begin))):
                    found.update(part)
                    begin += len(part)
    return found.hexdigest()


def _sampled(stream: BinaryIO, size: int) -> list[tuple[int, int]]:
    """Begin and end of what tells a file from others of its size."""
    tensors = _tensors(stream, size)
    if tensors is None:
        return [(0, size)]
    ranges = [(0, min((begin for begin, _ in tensors), default=size))]  # the header
    for begin, end in tensors:
        middle = max(begin, end - SAMPLED_BYTES)
        ranges += [(begin, min(begin + SAMPLED_BYTES, middle)), (middle, end)]
    return ranges


def _tensors(stream: BinaryIO, size: int) -> list[tuple[int, int]] | None:
    """Where the tensors of a safetensors file are, one behind the other; None where it is none."""
    start = 8 + int.from_bytes(stream.read(8), "little")
    if start > min(size, MOST_HEADER_BYTES):
        return None
    try:
        header = json.loads(stream.read(start - 8))
        header.pop("__metadata__", None)
        found = sorted(tuple(entry["data_offsets"]) for entry in header.values())
        places = [(start + begin, start + end) for begin, end in found]
        if any(type(each) is not int for place in places for each in place):
            return None
        begins, ends = [begin for begin, _ in places], [end for _, end in places]
        return places if [start, *ends] == [*begins, size] else None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
