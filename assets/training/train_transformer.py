"""Trains the tiny `WanTransformer3DModel` and its text encoder together, by flow matching.

    python train_transformer.py --vae runs/vae/vae --out runs/transformer [--resume]
        [--start FOLDER] [--seconds 1620] [--pause-after 540]

With `torchrun --nproc-per-node 2 -- train_transformer.py ...` two GPUs train on clips of their own.

Clips are drawn and encoded while training goes on and kept in a pool of latents in GPU memory. A
step takes a batch from the pool: x_t = (1 - sigma) x_0 + sigma noise, at timestep 1000 sigma, is to
give noise - x_0. One batch in sixteen consists of single frames.

Writes to OUT: state.pt (everything, for --resume), transformer/ and text_encoder/ (the weights'
moving average, float16), log.csv, loss.png and samples.png (from the averaged weights, with
guidance). --start begins a new run from such parts. `export.py` makes the pipeline folder.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import math
import random
from pathlib import Path

import torch
import torch.nn.functional as F
from common import (
    Log,
    Ranks,
    Schedule,
    contact_sheet,
    encode_moments,
    load_clips,
    loss_curve,
    to_device,
    update_average,
    use_one_pass,
)
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from drawing import draw
from muon import Muon
from scenes import PAIRS
from text import (
    TEXT_DIM,
    embed,
    new_text_encoder,
    new_tokenizer,
    tokenize,
)
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, UMT5EncoderModel

SHIFT = 3.0  # of the noise levels, in training and in the exported scheduler
LOGIT_MEAN = 1.0  # of the logit-normal half of the noise levels, before the shift
TEXT_LENGTHS, TEXT_LENGTH_WEIGHTS = (64, 128, 256, 512), (6, 2, 1, 1)
SAMPLES = (
    "a red circle moves left over a blue gradient",
    "a green star spins over a gray checkerboard",
    "a large yellow square bounces over purple stripes",
    "a white heart grows over a plain red background",
    "a striped orange triangle moves up over a green gradient",
    "a cyan ring moves in a circle over a yellow background",
    "a dotted pink diamond moves to the lower right over a gray background",
    "a blue cross stays still over orange dots",
    "a red circle moves left and a yellow star spins over a green checkerboard",
    "a small white square moves down and a large pink heart moves right over a blue background",
    "a purple triangle shrinks and a cyan circle moves up over red stripes",
    "a large checkered red square spins over a cyan gradient",
)


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
    """The trained VAE's encoder: staged clips to normalised latents."""

    def __init__(self, folder: Path, device: torch.device, *, compile_: bool) -> None:
        self.vae = AutoencoderKLWan.from_pretrained(folder).to(device).eval().requires_grad_(False)
        config = self.vae.config
        self.mean = torch.tensor(config.latents_mean, device=device).view(1, -1, 1, 1, 1)
        self.std = torch.tensor(config.latents_std, device=device).view(1, -1, 1, 1, 1)
        self.device = device
        self.one_pass = copy.deepcopy(self.vae)
        use_one_pass(self.one_pass)
        self.run = torch.compile(self._encode) if compile_ else self._encode

    def _encode(self, staging: dict[str, Tensor]) -> Tensor:
        video = draw(staging).bfloat16().contiguous(memory_format=torch.channels_last_3d)
        mean, _ = encode_moments(self.one_pass, video)
        return ((mean.float() - self.mean) / self.std).bfloat16()

    @torch.no_grad()
    def __call__(self, staging: dict[str, Tensor]) -> Tensor:
        """Latents (B, 8, 9, 32, 32), bfloat16, of mean 0 and standard deviation 1."""
        with torch.autocast(self.device.type, torch.bfloat16):
            return self.run(to_device(staging, self.device))

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Videos (B, 3, F, H, W), float32, the way of the pipelines, four clips at a time."""
        latents = latents * self.std + self.mean
        return torch.cat([self.vae.decode(part).sample for part in latents.split(4)])


class Pool:
    """The latest clips, as latents and token ids, in GPU memory; new ones replace the oldest."""

    def __init__(self, *, capacity: int, encoder: Encoder, tokenizer: PreTrainedTokenizerFast):
        self.encoder, self.tokenizer, self.capacity = encoder, tokenizer, capacity
        self.latents: Tensor | None = None
        self.ids: Tensor | None = None
        self.added = 0

    def add(self, staging: dict[str, Tensor], captions: list[str]) -> None:
        """Encodes a batch of clips into the pool; `capacity` is a multiple of its size."""
        latents = self.encoder(staging)
        ids = tokenize(self.tokenizer, captions).to(latents.device, non_blocking=True)
        if self.latents is None:
            self.latents = latents.new_empty(self.capacity, *latents.shape[1:])
            self.ids = ids.new_empty(self.capacity, ids.shape[1])
        at = self.added % self.capacity
        self.latents[at : at + len(ids)] = latents
        self.ids[at : at + len(ids)] = ids
        self.added += len(ids)

    def batch(self, size: int) -> tuple[Tensor, Tensor]:
        """Random latents (B, 8, 9, 32, 32) and token ids (B, words)."""
        filled = min(self.added, self.capacity)
        pick = torch.randint(filled, (size,), device=self.latents.device)
        return self.latents[pick], self.ids[pick]


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


def sample_sigma(count: int, device: torch.device) -> Tensor:
    """Noise levels: half uniform, half logit-normal, then shifted towards noise."""
    u = torch.rand(count, device=device)
    u[count // 2 :] = (torch.randn(count - count // 2, device=device) + LOGIT_MEAN).sigmoid()
    return SHIFT * u / (1.0 + (SHIFT - 1.0) * u)


def flow_loss(model: Denoiser, latents: Tensor, ids: Tensor, *, text_length: int) -> Tensor:
    """Mean squared error of the predicted velocity; the last 1/8 of captions gives way to ""."""
    ids = ids.clone()
    unconditional = ids[-(len(ids) // 8) :]
    unconditional[:, 1:] = model.text_encoder.config.pad_token_id
    unconditional[:, 0] = model.text_encoder.config.eos_token_id
    sigma = sample_sigma(len(ids), latents.device)[torch.randperm(len(ids), device=ids.device)]
    noise = torch.randn(latents.shape, device=latents.device)
    level = sigma.view(-1, 1, 1, 1, 1)
    noisy = (1.0 - level) * latents.float() + level * noise
    velocity = model(noisy, sigma, ids, text_length=text_length)
    return F.mse_loss(velocity.float(), noise - latents.float())


@torch.no_grad()
def sample(
    model: Denoiser,
    tokenizer: PreTrainedTokenizerFast,
    prompts: tuple[str, ...],
    *,
    shape: tuple[int, ...],
    steps: int = 50,
    guidance: float = 4.0,
    seed: int = 0,
) -> Tensor:
    """Normalised latents for prompts, by Euler steps with classifier-free guidance."""
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    latents = torch.randn(len(prompts), *shape, generator=generator, device=device)
    ids = tokenize(tokenizer, [*prompts, *[""] * len(prompts)]).to(device)
    u = torch.linspace(1.0, 0.0, steps + 1)
    sigmas = (SHIFT * u / (1.0 + (SHIFT - 1.0) * u)).tolist()
    for now, then in itertools.pairwise(sigmas):
        sigma = torch.full((len(ids),), now, device=device)
        with torch.autocast(device.type, torch.bfloat16):
            both = model(latents.repeat(2, 1, 1, 1, 1), sigma, ids, text_length=64).float()
        with_text, without = both.chunk(2)
        latents = latents + (then - now) * (without + guidance * (with_text - without))
    return latents


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


def optimizers(model: Denoiser, *, lr: float, device: torch.device) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the transformer's blocks, AdamW for all else."""
    matrices = [p for p in model.transformer.blocks.parameters() if p.ndim == 2]
    taken = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in taken]
    return [
        Muon(matrices, lr=lr, weight_decay=0.01),
        torch.optim.AdamW(
            others, lr=lr, betas=(0.9, 0.99), weight_decay=0.0, fused=device.type == "cuda"
        ),
    ]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vae", type=Path, required=True, help="folder of the trained VAE")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", action="store_true", help="go on from OUT/state.pt")
    parser.add_argument("--start", type=Path, help="folder with weights to begin a new run from")
    parser.add_argument("--seed", type=int, default=2, help="of the clips")
    parser.add_argument("--freeze-text", action="store_true", help="train the transformer only")
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=1620.0, help="all runs together")
    parser.add_argument("--pause-after", type=float, default=math.inf, help="seconds of this run")
    parser.add_argument("--batch", type=int, default=64, help="clips per step and GPU")
    parser.add_argument("--fresh", type=int, default=16, help="new clips per step")
    parser.add_argument("--pairs", type=float, default=PAIRS, help="share with two objects")
    parser.add_argument("--pool", type=int, default=65_536, help="clips kept at most")
    parser.add_argument("--first-clips", type=int, default=8_192, help="clips to begin with")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--decay-from", type=float, default=0.5, help="share at the peak rate")
    parser.add_argument("--ema", type=float, default=0.999)
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--samples", type=int, default=len(SAMPLES))
    parser.add_argument("--sample-steps", type=int, default=50)
    parser.add_argument("--no-compile", action="store_true")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    ranks = Ranks()
    device = ranks.device
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    args.out.mkdir(parents=True, exist_ok=True)

    tokenizer = new_tokenizer()
    torch.manual_seed(0)
    model = Denoiser(tokenizer).to(device)
    average = copy.deepcopy(model).requires_grad_(False)
    model.text_encoder.requires_grad_(not args.freeze_text)
    both = optimizers(model, lr=args.lr, device=device)
    step, spent = 0, 0.0
    if args.resume:
        state = torch.load(args.out / "state.pt", map_location=device)
        model.load_state_dict(state["model"])
        average.load_state_dict(state["average"])
        for optimizer, values in zip(both, state["optimizers"], strict=True):
            optimizer.load_state_dict(values)
        step, spent = state["step"], state["spent"]
    elif args.start:
        load_parts(model, args.start)
        average.load_state_dict(model.state_dict())

    torch.manual_seed(step + (ranks.rank << 32))
    random.seed(step)  # the ranks take the same text lengths
    encoder = Encoder(args.vae, device, compile_=not args.no_compile)
    pool = Pool(capacity=args.pool, encoder=encoder, tokenizer=tokenizer)
    clips = load_clips(
        seed=args.seed + 1000 * ranks.rank,
        pairs=args.pairs,
        first=step * args.fresh + (args.first_clips if step else 0),
        batch=args.fresh,
        workers=args.workers,
    )
    while pool.added < args.first_clips:
        pool.add(*next(clips))
    if not args.no_compile:
        model.transformer.compile_repeated_blocks()

    log = Log(args.out / f"log{ranks.rank or ''}.csv", fields=("step", "seconds", "lr", "loss"))
    schedule = Schedule(
        steps=args.steps,
        seconds=args.seconds,
        pause_after=args.pause_after,
        step=step,
        spent=spent,
        ranks=ranks,
    )
    params, averages = list(model.parameters()), list(average.parameters())
    recent = []
    while schedule.running:
        pool.add(*next(clips))
        latents, ids = pool.batch(args.batch)
        if schedule.step % 16 == 15:
            latents = latents[:, :, :1]
        length = random.choices(TEXT_LENGTHS, TEXT_LENGTH_WEIGHTS)[0]
        with torch.autocast(device.type, torch.bfloat16):
            loss = flow_loss(model, latents, ids, text_length=length)
        loss.backward()
        ranks.average_gradients(params)
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        rate = args.lr * schedule.rate(warmup=200, decay_from=args.decay_from)
        for optimizer in both:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad()
        update_average(averages, [p.detach() for p in params], step=schedule.step, decay=args.ema)
        if latents.shape[2] > 1:  # single frames have another loss
            recent.append(loss.detach())
        schedule.advance()
        if schedule.step % 100 == 0:
            log.add(
                step=schedule.step,
                seconds=schedule.spent,
                lr=rate,
                loss=torch.stack(recent).mean().item(),
            )
            recent = []

    ranks.close()
    if ranks.rank > 0:  # all ranks hold the same weights
        return
    step, spent = schedule.step, schedule.spent
    clips_seen = step * args.batch * ranks.count
    print(f"{step} steps, {spent:.0f} s, {clips_seen} clips", flush=True)
    torch.save(
        {
            "model": model.state_dict(),
            "average": average.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in both],
            "step": step,
            "spent": spent,
        },
        args.out / "state.pt",
    )
    save_parts(average, args.out)
    loss_curve(log.path, args.out / "loss.png", field="loss", title="Flow-matching loss")
    prompts = SAMPLES[: args.samples]
    shape = tuple(pool.latents.shape[1:])
    latents = sample(average.eval(), tokenizer, prompts, shape=shape, steps=args.sample_steps)
    contact_sheet(encoder.decode(latents), list(prompts), args.out / "samples.png")


if __name__ == "__main__":
    main()
