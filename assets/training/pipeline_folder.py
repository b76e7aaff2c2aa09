"""Writes a pipeline folder for `DiffusionPipeline.from_pretrained` in place of an older one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from diffusers import DiffusionPipeline

KEPT = ("README.md", "chipsparse.yaml")


def replace_folder(
    pipeline: DiffusionPipeline,
    out: Path,
    *,
    shard: str | None = None,
    finish: Callable[[Path], None] | None = None,
) -> None:
    """Saves the pipeline as OUT and prints its size.

    The model card and profile in OUT stay as they are; the model folders are replaced. No file of
    weights is larger than `shard`; `finish` may change the new folder.
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
        file.chmod(0o644)
    for name in KEPT:
        if (out / name).exists():
            shutil.copy(out / name, fresh / name)
    shutil.rmtree(out, ignore_errors=True)
    fresh.rename(out)
    size = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    print(f"{out}: {size / 1e6:.1f} MB")
