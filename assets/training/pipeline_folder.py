"""Writes a pipeline folder for `DiffusionPipeline.from_pretrained` in place of an older one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from diffusers import DiffusionPipeline
from safetensors.torch import load_file, save_file

KEPT = ("README.md", "chipsparse.yaml")


def replace_folder(
    pipeline: DiffusionPipeline,
    out: Path,
    *,
    shard: str | None = None,
    finish: Callable[[Path], None] | None = None,
) -> None:
    """Saves the pipeline as OUT, its weights in float16, and prints its size.

    The model card and profile in OUT stay as they are; the model folders are replaced.

    Args:
        pipeline: its parts, in float32
        out: the folder
        shard: no file of weights is larger
        finish: may change the new folder

    Raises:
        ValueError: a weight is beyond what float16 holds.
    """
    fresh = out.with_name(out.name + ".new")
    shutil.rmtree(fresh, ignore_errors=True)
    pipeline.save_pretrained(fresh, max_shard_size=shard)
    if finish is not None:
        finish(fresh)
    for file in [fresh / "model_index.json", *fresh.glob("tokenizer*/tokenizer_config.json")]:
        # transformers 5 writes a class name of its own; 4 and 5 both know this one
        text = file.read_text()
        file.write_text(text.replace("TokenizersBackend", "PreTrainedTokenizerFast"))
    for file in fresh.rglob("config.json"):  # where the weights lay is nobody's business
        config = json.loads(file.read_text())
        config.pop("_name_or_path", None)
        file.write_text(json.dumps(config, indent=2) + "\n")
    for file in fresh.rglob("*.safetensors"):
        store_in_half(file)
        file.chmod(0o644)
    for name in KEPT:
        if (out / name).exists():
            shutil.copy(out / name, fresh / name)
    shutil.rmtree(out, ignore_errors=True)
    fresh.rename(out)
    size = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    print(f"{out}: {size / 1e6:.1f} MB")


def store_in_half(file: Path) -> None:
    """Rounds the floating-point weights in a safetensors file to float16.

    The configs beside it stay as they are: transformers loads weights in the dtype that its config
    names, diffusers in float32 where none is asked for, whatever the file has.

    Raises:
        ValueError: a weight is beyond what float16 holds.
    """
    weights = load_file(file)
    for name, value in weights.items():
        if value.is_floating_point():
            weights[name] = value.to(torch.float16)
            if not weights[name].isfinite().all():
                raise ValueError(f"{name} in {file} reaches {value.abs().max()}, beyond float16")
    save_file(weights, file, metadata={"format": "pt"})
