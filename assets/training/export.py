"""Puts the trained parts together: a pipeline folder for `DiffusionPipeline.from_pretrained`.

    python export.py --vae runs/vae/vae --parts runs/transformer --out ../tiny-wan

The model card and profile in OUT stay as they are; the model folders are replaced.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from diffusers import (
    AutoencoderKLWan,
    FlowMatchEulerDiscreteScheduler,
    WanPipeline,
    WanTransformer3DModel,
)
from flow_matching import SHIFT
from pipeline_folder import replace_folder
from text import new_tokenizer
from transformers import UMT5EncoderModel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vae", type=Path, required=True)
    parser.add_argument("--parts", type=Path, required=True, help="transformer and text_encoder")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()

    text_encoder = UMT5EncoderModel.from_pretrained(args.parts / "text_encoder").float()
    pipeline = WanPipeline(
        tokenizer=new_tokenizer(),
        text_encoder=text_encoder,
        vae=AutoencoderKLWan.from_pretrained(args.vae),
        transformer=WanTransformer3DModel.from_pretrained(args.parts / "transformer"),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=SHIFT),
    )
    replace_folder(pipeline, args.out)


if __name__ == "__main__":
    main()
