"""Puts trained parts together: a pipeline folder for `DiffusionPipeline.from_pretrained`.

    python export.py --vae runs/vae/vae --text runs/fourth --transformer runs/fourth \
        --out ../tiny-wan

--text and --transformer hold folders like `text_encoder` and `transformer`; the latter's class says
which pipeline it is. The model card and profile in OUT stay; the model folders are replaced.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLWan,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    FluxTransformer2DModel,
    WanPipeline,
    WanTransformer3DModel,
)
from flow_matching import SHIFT
from flux_common import new_pipeline
from flux_text import TextEncoders, use_checkpoint_names
from safetensors.torch import load_file, save_file
from text import new_tokenizer
from transformers import CLIPTextModel, UMT5EncoderModel

KEPT = ("README.md", "chipsparse.yaml")


def replace_folder(pipeline: DiffusionPipeline, out: Path) -> None:
    """Saves the pipeline as OUT, its weights in float16, and prints its size.

    The model card and profile in OUT stay as they are; the model folders are replaced.

    Args:
        pipeline: its parts, in float32
        out: the folder

    Raises:
        ValueError: a weight is beyond what float16 holds.
    """
    fresh = out.with_name(out.name + ".new")
    shutil.rmtree(fresh, ignore_errors=True)
    pipeline.save_pretrained(fresh)
    if isinstance(pipeline.text_encoder, CLIPTextModel):
        use_checkpoint_names(fresh / "text_encoder")
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


def wan_pipeline(vae: Path, text: Path, transformer: Path) -> WanPipeline:
    """tiny-wan of these folders."""
    return WanPipeline(
        tokenizer=new_tokenizer(),
        text_encoder=UMT5EncoderModel.from_pretrained(text / "text_encoder").float(),
        vae=AutoencoderKLWan.from_pretrained(vae),
        transformer=WanTransformer3DModel.from_pretrained(transformer / "transformer"),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=SHIFT),
    )


def flux_pipeline(vae: Path, text: Path, transformer: Path) -> DiffusionPipeline:
    """tiny-flux of these folders."""
    model = FluxTransformer2DModel.from_pretrained(transformer / "transformer")
    return new_pipeline(AutoencoderKL.from_pretrained(vae), TextEncoders.load(text), model)


MAKERS = {"WanTransformer3DModel": wan_pipeline, "FluxTransformer2DModel": flux_pipeline}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for part in ("vae", "text", "transformer", "out"):
        parser.add_argument(f"--{part}", type=Path, required=True)
    args = parser.parse_args()
    config = json.loads((args.transformer / "transformer" / "config.json").read_text())
    pipeline = MAKERS[config["_class_name"]](args.vae, args.text, args.transformer)
    replace_folder(pipeline, args.out)


if __name__ == "__main__":
    main()
