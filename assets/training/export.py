"""Puts the trained parts together: a pipeline folder for `DiffusionPipeline.from_pretrained`.

    python export.py --vae runs/vae/vae --parts runs/transformer --out ../tiny-wan

The model card and profile in OUT stay as they are; the model folders are replaced.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from diffusers import (
    AutoencoderKLWan,
    FlowMatchEulerDiscreteScheduler,
    WanPipeline,
    WanTransformer3DModel,
)
from text import new_tokenizer
from train_transformer import SHIFT
from transformers import UMT5EncoderModel

KEPT = ("README.md", "chipsparse.yaml")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vae", type=Path, required=True)
    parser.add_argument("--parts", type=Path, required=True, help="transformer and text_encoder")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()

    transformer = WanTransformer3DModel.from_pretrained(args.parts / "transformer")
    text_encoder = UMT5EncoderModel.from_pretrained(args.parts / "text_encoder").float()
    pipeline = WanPipeline(
        tokenizer=new_tokenizer(),
        text_encoder=text_encoder,
        vae=AutoencoderKLWan.from_pretrained(args.vae),
        transformer=transformer.to(torch.float16),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=SHIFT),
    )
    fresh = args.out.with_name(args.out.name + ".new")
    shutil.rmtree(fresh, ignore_errors=True)
    pipeline.save_pretrained(fresh)
    for name in ("model_index.json", "tokenizer/tokenizer_config.json"):
        # transformers 5 writes a class name of its own; 4 and 5 both know this one
        text = (fresh / name).read_text()
        (fresh / name).write_text(text.replace("TokenizersBackend", "PreTrainedTokenizerFast"))
    for file in fresh.rglob("config.json"):  # where the weights lay is nobody's business
        config = json.loads(file.read_text())
        config.pop("_name_or_path", None)
        file.write_text(json.dumps(config, indent=2) + "\n")
    for file in fresh.rglob("*.safetensors"):
        file.chmod(0o644)
    for name in KEPT:
        if (args.out / name).exists():
            shutil.copy(args.out / name, fresh / name)
    shutil.rmtree(args.out, ignore_errors=True)
    fresh.rename(args.out)
    size = sum(f.stat().st_size for f in args.out.rglob("*") if f.is_file())
    print(f"{args.out}: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
