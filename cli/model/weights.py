"""A model's weights: how large they are by its configs, and a digest that tells them."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers

from chipsparse.cli.errors import UserError, user_errors
from chipsparse.cli.model.description import ModelDescription, read_json

# What a digest reads of a file: all of up to 16 MiB.
PIECES = 256
PIECE_BYTES = 1 << 16


def count_weights(model: ModelDescription, dtype: torch.dtype) -> dict[str, int | None]:
    """Return the bytes of every component that has weights, largest first, as they are loaded.

    None where its folder has no config. A config that says how weights are quantized changes
    nothing: they are counted as if they were not. Raises `UserError` for a config that makes none.
    """
    sizes: dict[str, int | None] = {}
    for name, (library, class_name) in model.components.items():
        source = {"diffusers": diffusers, "transformers": transformers}.get(library)
        kind = getattr(source, class_name, None)
        if inspect.isclass(kind) and issubclass(kind, torch.nn.Module):
            sizes[name] = _count(model, name, kind, dtype)
    return dict(sorted(sizes.items(), key=lambda item: -(item[1] or 0)))


def _count(model: ModelDescription, name: str, kind: Any, dtype: torch.dtype) -> int | None:
    try:
        config = read_json(model.location, f"{name}/config.json")
    except UserError:
        return None
    what = f"{name}/config.json of the model {model.location} makes no {kind.__name__}"
    with user_errors(Exception, what=what), torch.device("meta"):
        module = made_from(kind, config)
    # Loaded in float32 where less is asked for; transformers makes exceptions from float16 only.
    full_in = {torch.float16, *([torch.bfloat16] if hasattr(kind, "from_config") else [])}
    kept = set(getattr(kind, "_keep_in_fp32_modules", None) or []) if dtype in full_in else set()
    return sum(
        parameter.numel() * (torch.float32 if kept & set(path.split(".")) else dtype).itemsize
        for path, parameter in module.named_parameters()
    )


def made_from(kind: Any, config: dict[str, Any]) -> torch.nn.Module:
    """Return a component of diffusers or transformers, with the weights it begins with."""
    if hasattr(kind, "from_config"):  # of diffusers
        return kind.from_config(config)
    return kind(kind.config_class.from_dict(config))


def weights_digest(model: ModelDescription) -> str | None:
    """Return a digest of a model's folder: of its weights, configs, and tokenizers.

    Neither names of folders nor times count. None for a hub model, which its name tells.
    """
    folder = Path(model.location)
    if not folder.is_dir():
        return None
    files = list(folder.glob("*model_index.json"))
    for name in model.components:
        files += (file for file in (folder / name).rglob("[!.]*") if file.is_file())
    return files_digest({file.relative_to(folder).as_posix(): file for file in files})


def files_digest(files: Mapping[str, Path]) -> str:
    """Return a digest that tells files from others, by the names given here and their contents.

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
