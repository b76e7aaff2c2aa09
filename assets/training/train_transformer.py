"""Trains the tiny `WanTransformer3DModel` and its text encoder together, by flow matching.

    python train_transformer.py --vae runs/vae/vae --out runs/transformer [--resume]
        [--start FOLDER] [--seconds 1620] [--pause-after 540]

With `torchrun --nproc-per-node 2 -- train_transformer.py ...` two GPUs train on clips of their own.

Clips are drawn and encoded while training goes on and kept in a pool of latents in GPU memory. A
step takes a batch from the pool (`flow_matching.py`), at timesteps 1000 sigma. One batch in sixteen
consists of single frames.

Writes to OUT: state.pt (everything, for --resume), transformer/ and text_encoder/ (the weights'
moving average, float16), log.csv and loss.webp. --start begins a new run from such parts.
`export.py` makes the pipeline folder, with which `sample.py` draws.
"""

from __future__ import annotations

import argparse
import copy
import functools
import random
from collections.abc import Callable
from pathlib import Path

import torch
from common import (
    encode_moments,
    load_clips,
    to_device,
    use_one_pass,
)
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from drawing import draw
from flow_matching import (
    Pool,
    example_range,
    flow_loss,
    new_parser,
    new_training,
    prepare,
    sample_sigma,
    train,
)
from scenes import PAIRS, SIZE, enlarge
from text import (
    TEXT_DIM,
    embed,
    new_text_encoder,
    new_tokenizer,
    tokenize,
)
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, UMT5EncoderModel

TEXT_LENGTHS, TEXT_LENGTH_WEIGHTS = (64, 128, 256, 512), (6, 2, 1, 1)


def new_transformer() -> WanTransformer3DModel:
    """The transformer with fresh weights."""
    return WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=4,
        attention_head_dim=64,
        in_channels=8,
        out_channels=8,
        text_dim=TEXT_DIM,
        freq_dim=256,
        ffn_dim=1024,
        num_layers=10,
        cross_attn_norm=True,
    )


class Encoder:
    """The trained VAE's encoder: staged clips to normalised latents.

    Args:
        folder: of the VAE
        compile_: whether to compile drawing and encoding
        side: of the canvas in pixels
    """

    def __init__(
        self, folder: Path, device: torch.device, *, compile_: bool, side: int = SIZE
    ) -> None:
        self.vae = AutoencoderKLWan.from_pretrained(folder).to(device).eval().requires_grad_(False)
        config = self.vae.config
        self.mean = torch.tensor(config.latents_mean, device=device).view(1, -1, 1, 1, 1)
        self.std = torch.tensor(config.latents_std, device=device).view(1, -1, 1, 1, 1)
        self.device, self.side = device, side
        use_one_pass(self.vae)
        self.run = torch.compile(self._encode) if compile_ else self._encode

    def _encode(self, staging: dict[str, Tensor]) -> Tensor:
        video = (
            draw(enlarge(staging, self.side), side=self.side)
            .bfloat16()
            .contiguous(memory_format=torch.channels_last_3d)
        )
        mean, _ = encode_moments(self.vae, video)
        return ((mean.float() - self.mean) / self.std).bfloat16()

    @torch.no_grad()
    def __call__(self, staging: dict[str, Tensor]) -> Tensor:
        """Latents (B, 8, f, h, w), bfloat16, of mean 0 and standard deviation 1."""
        with torch.autocast(self.device.type, torch.bfloat16):
            return self.run(to_device(staging, self.device))


class Denoiser(nn.Module):
    """Text encoder and transformer: predicts the velocity (noise - data) from token ids."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        super().__init__()
        self.text_encoder = new_text_encoder(tokenizer)
        self.transformer = new_transformer()

    def forward(self, noisy: Tensor, sigma: Tensor, ids: Tensor, *, text_length: int) -> Tensor:
        """noisy (B, 8, f, h, w), sigma (B,), ids (B, words) to (B, 8, f, h, w)."""
        text = embed(self.text_encoder, ids, length=text_length)
        return self.transformer(noisy, sigma * 1000.0, text, return_dict=False)[0]


def step_loss(
    model: Denoiser,
    lengths: random.Random,
    step: int,
    latents: Tensor,
    ids: Tensor,
    *,
    expected: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> tuple[Tensor, bool]:
    """The loss of a step; the last 1/8 of captions gives way to "". Single frames do not count.

    `expected` of `flow_loss` is for whole clips.
    """
    single_frames = step % 16 == 15
    if single_frames:
        latents, expected = latents[:, :, :1], None
    length = lengths.choices(TEXT_LENGTHS, TEXT_LENGTH_WEIGHTS)[0]
    loss = clip_loss(model, latents, ids, length, without=len(ids) // 8, expected=expected)
    return loss, not single_frames


def clip_loss(
    model: Denoiser,
    latents: Tensor,
    ids: Tensor,
    length: int,
    *,
    without: int,
    levels: Callable[[int, torch.device], Tensor] = sample_sigma,
    expected: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Tensor:
    """The loss of a batch whose last `without` captions give way to ""; more: `flow_loss`."""
    unconditional = ids[len(ids) - without :]
    unconditional[:, 1:] = model.text_encoder.config.pad_token_id
    unconditional[:, 0] = model.text_encoder.config.eos_token_id
    predict = functools.partial(model, ids=ids, text_length=length)
    with torch.autocast(latents.device.type, torch.bfloat16):
        return flow_loss(predict, latents, levels=levels, expected=expected)


def save_parts(model: Denoiser, out: Path) -> None:
    """Writes OUT/transformer and OUT/text_encoder in float16, in files of at most 15 MB."""
    model = copy.deepcopy(model).half()
    model.transformer.save_pretrained(out / "transformer", max_shard_size="15MB")
    model.text_encoder.save_pretrained(out / "text_encoder")


def load_parts(model: Denoiser, folder: Path) -> None:
    """Loads what `save_parts` wrote, or the same parts of a pipeline folder."""
    transformer = WanTransformer3DModel.from_pretrained(folder / "transformer")
    text_encoder = UMT5EncoderModel.from_pretrained(folder / "text_encoder")
    model.transformer.load_state_dict(transformer.float().state_dict())
    model.text_encoder.load_state_dict(text_encoder.float().state_dict())


def parse_arguments() -> argparse.Namespace:
    parser = new_parser(
        __doc__,
        noun="clips",
        seconds=1620.0,
        pool=65_536,
        lr=1e-3,
        decay_from=0.5,
    )
    parser.add_argument("--freeze-text", action="store_true", help="train the transformer only")
    parser.add_argument("--pairs", type=float, default=PAIRS, help="share with two objects")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    ranks = prepare(args)
    device = ranks.device
    tokenizer = new_tokenizer()
    model = Denoiser(tokenizer).to(device)
    if args.start and not args.resume:
        load_parts(model, args.start)
    model.text_encoder.requires_grad_(not args.freeze_text)
    matrices = [p for p in model.transformer.blocks.parameters() if p.ndim == 2]
    training = new_training(model, matrices, args, ranks)

    encoder = Encoder(args.vae, device, compile_=not args.no_compile)

    def encode(staging: dict[str, Tensor], captions: list[str]) -> list[Tensor]:
        ids = tokenize(tokenizer, captions).to(device, non_blocking=True)
        return [encoder(staging), ids]

    pool = Pool(capacity=args.pool, encode=encode)
    clips = load_clips(pairs=args.pairs, **example_range(args, training))
    if not args.no_compile:
        model.transformer.compile_repeated_blocks()
    loss = functools.partial(step_loss, model, random.Random(training.step))
    if train(training, pool, clips, loss, args):
        save_parts(training.average, args.out)


if __name__ == "__main__":
    main()
