"""A model's weights: how large they are by its configs, whether they are there, and which."""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from safetensors import SafetensorError, safe_open

from chipsparse.cli.errors import UserError, user_errors
from chipsparse.cli.model.description import ModelDescription, read_json
from chipsparse.cli.views.units import counted

SUFFIXES = (".safetensors", ".bin", ".pt")
INCOMPLETE = "incomplete download?"
# What a digest reads of a file: all of up to 16 MiB.
PIECES, PIECE_BYTES = 256, 1 << 16
DAMAGED = (OSError, SafetensorError, ValueError, KeyError, AttributeError)


def count_weights(model: ModelDescription, dtype: torch.dtype) -> dict[str, int | None]:
    """Return the bytes of every component that has weights, largest first, as they are loaded.

    None where its folder has no config. A config that says how weights are quantized changes
    nothing: they are counted as if they were not.
    """
    kinds = {name: component_class(*entry) for name, entry in model.components.items()}
    sizes = {
        name: _count(model, name, kind, dtype) for name, kind in kinds.items() if kind is not None
    }
    return dict(sorted(sizes.items(), key=lambda item: -(item[1] or 0)))


def component_class(library: str, class_name: str) -> Any:
    """Return the class of a component that has weights, else None."""
    source = {"diffusers": diffusers, "transformers": transformers}.get(library)
    kind = getattr(source, class_name, None)
    return kind if inspect.isclass(kind) and issubclass(kind, torch.nn.Module) else None


def made_from(kind: Any, config: dict[str, Any]) -> torch.nn.Module:
    """Return a component of diffusers or transformers, with the weights it begins with."""
    if hasattr(kind, "from_config"):
        made: torch.nn.Module = kind.from_config(config)
        return made
    return kind(kind.config_class.from_dict(config))


def _count(model: ModelDescription, name: str, kind: Any, dtype: torch.dtype) -> int | None:
    try:
        config = read_json(model.location, f"{name}/config.json")
    except UserError:
        return None
    with torch.device("meta"):
        module = made_from(kind, config)
    # Loaded in float32 where less is asked for; transformers makes exceptions from float16 only.
    full_in = {torch.float16, *([torch.bfloat16] if hasattr(kind, "from_config") else [])}
    kept = set(getattr(kind, "_keep_in_fp32_modules", None) or []) if dtype in full_in else set()
    return sum(
        parameter.numel() * (torch.float32 if kept & set(path.split(".")) else dtype).itemsize
        for path, parameter in module.named_parameters()
    )


def check_weight_files(model: ModelDescription, folder: Path) -> None:
    """Raise `UserError` for weights that are missing, damaged, or of another config.

    Without this, diffusers loads a transformer whose config names another number of layers than its
    weights have, and makes a wrong result.
    """
    for name, entry in model.components.items():
        kind = component_class(*entry)
        if kind is None:
            continue
        shapes: dict[str, tuple[int, ...]] = {}
        for file in _weight_files(folder / name, f"the {name} of the model {model.location}"):
            with (
                user_errors(*DAMAGED, what=f"{file} is damaged ({INCOMPLETE})"),
                safe_open(file, framework="numpy") as tensors,
            ):
                for key in tensors.keys():  # noqa: SIM118 (it is no mapping)
                    shapes[key] = tuple(tensors.get_slice(key).get_shape())
        if name.startswith("transformer") and shapes:
            _check_config(kind, folder / name / "config.json", shapes)


def _weight_files(folder: Path, whose: str) -> list[Path]:
    """Return a component's safetensors files, if it has some; others cannot be looked into.

    Raises:
        UserError: there are no weights, or not all of those that an index names.
    """
    files = sorted(file for file in folder.iterdir() if file.suffix in SUFFIXES)
    if not files:
        raise UserError(
            f"{whose} has no weights: there is no .safetensors file in {folder} ({INCOMPLETE})"
        )
    for index in sorted(folder.glob("*.safetensors.index.json")):
        with user_errors(*DAMAGED, what=f"{index} is damaged ({INCOMPLETE})"):
            named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        missing = sorted(named - {file.name for file in files})
        if missing:
            raise UserError(f"{whose} has no {missing[0]}, which {index.name} names ({INCOMPLETE})")
    return [file for file in files if file.suffix == ".safetensors"]


def _check_config(kind: Any, file: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise `UserError` where a config and its weights are of different models."""
    config = json.loads(file.read_text(encoding="utf-8"))
    if "quantization_config" in config:
        return  # its tensors have other names and shapes
    with user_errors(Exception, what=f"{file} makes no {kind.__name__}"), torch.device("meta"):
        made = made_from(kind, config)
    wanted = {name: tuple(tensor.shape) for name, tensor in made.state_dict().items()}
    ignored = getattr(kind, "_keys_to_ignore_on_load_unexpected", None) or ()
    unexpected = [
        name
        for name in shapes
        if name not in wanted and not any(re.search(pattern, name) for pattern in ignored)
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
                f"{file} does not fit the weights beside it: it {fault}, such as {names[0]}"
            )


def weights_digest(model: ModelDescription) -> str | None:
    """Return what tells a model's folder from others: its weights, configs, and tokenizers.

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
    """Return what tells files from others, by the names that they are given and their contents.

    Small files count whole, of larger ones evenly spaced pieces. Raises `UserError` for what cannot
    be read.
    """
    digest = hashlib.blake2b(digest_size=6)
    for name, file in sorted(files.items()):
        with user_errors(OSError, what=f"{file} cannot be read"), file.open("rb") as stream:
            size = file.stat().st_size
            digest.update(f"{name} {size}\n".encode("utf-8", "surrogateescape"))
            for piece in range(PIECES):
                stream.seek(size * piece // PIECES)
                digest.update(stream.read(PIECE_BYTES))
    return digest.hexdigest()
