"""Puts the tiny Flux's parts together: a pipeline folder for `DiffusionPipeline.from_pretrained`.

    python export_flux.py --vae runs/flux_vae/vae --text runs/flux_text \
        --transformer runs/flux/transformer --out ../tiny-flux [--shard 15MB]

The model card and profile in OUT stay as they are; the model folders are replaced.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from diffusers import AutoencoderKL, FluxTransformer2DModel
from flux_common import new_pipeline
from flux_text import TextEncoders, use_checkpoint_names
from pipeline_folder import replace_folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vae", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--transformer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shard", default="1GB", help="no file of weights is larger")
    args = parser.parse_args()

    transformer = FluxTransformer2DModel.from_pretrained(args.transformer)
    vae = AutoencoderKL.from_pretrained(args.vae)
    pipeline = new_pipeline(vae, TextEncoders.load(args.text), transformer)
    replace_folder(
        pipeline,
        args.out,
        shard=args.shard,
        finish=lambda folder: use_checkpoint_names(folder / "text_encoder"),
    )


if __name__ == "__main__":
    main()
