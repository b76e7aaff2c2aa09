"""The mean of two runs' transformers, where one went on from the other.

    python mean_weights.py runs/anchored runs/further --share 0.7 --out runs/mean

--share is that of the first. Weights between two ends of training draw what both ends draw, and
less of what only one of them got wrong; from Wortsman et al., "Model soups" (2022). Writes
OUT/transformer, for `export.py`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from diffusers import WanTransformer3DModel


def mean_weights(
    first: torch.nn.Module, second: torch.nn.Module, *, share: float
) -> dict[str, torch.Tensor]:
    """Weights of the same names and shapes, float32, `share` of each being the first's.

    Raises:
        ValueError: the share is not between 0 and 1, or the two have other names or shapes.
    """
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"share must be from 0 to 1, got {share}")
    one, other = first.state_dict(), second.state_dict()
    shapes = [{(name, *value.shape) for name, value in each.items()} for each in (one, other)]
    if unlike := shapes[0] ^ shapes[1]:
        names = ", ".join(sorted({name for name, *_ in unlike}))
        raise ValueError(f"the two have other names or shapes: {names}")
    return {name: share * one[name].float() + (1.0 - share) * other[name].float() for name in one}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("first", type=Path, help="a folder with `transformer`")
    parser.add_argument("second", type=Path)
    parser.add_argument("--share", type=float, default=0.5, help="of the first")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    first, second = (
        WanTransformer3DModel.from_pretrained(folder / "transformer")
        for folder in (args.first, args.second)
    )
    first.load_state_dict(mean_weights(first, second, share=args.share))
    first.half().save_pretrained(args.out / "transformer")


if __name__ == "__main__":
    main()
