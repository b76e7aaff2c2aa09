"""Random-weight models of a few thousand parameters with the classes and shapes of the real ones.

They compute nothing meaningful, but run every code path of diffusers in about a second. The same
call gives the same weights, and leaves the global random state as it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from diffusers import (
    AutoencoderKLWan,
    FlowMatchEulerDiscreteScheduler,
    WanPipeline,
    WanTransformer3DModel,
)
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

WORDS = """
a an the red green blue yellow white black circle square triangle moves left right up down over on
gradient background and grows shrinks
""".split()  # noqa: SIM905 - a list literal would take one line per word
PROMPT = "a red circle moves left over a blue gradient"
SPECIAL_TOKENS = ("<pad>", "</s>", "<unk>")
LATENT_CHANNELS = 4
TEXT_DIM = 32

TRANSFORMER_CONFIG: dict[str, Any] = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 2,
    "attention_head_dim": 32,
    "in_channels": LATENT_CHANNELS,
    "out_channels": LATENT_CHANNELS,
    "text_dim": TEXT_DIM,
    "freq_dim": 32,
    "ffn_dim": 128,
    "num_layers": 3,
    "cross_attn_norm": True,
    "qk_norm": "rms_norm_across_heads",
    "rope_max_seq_len": 64,
}


def tiny_wan_transformer(*, seed: int = 0, **overrides: Any) -> WanTransformer3DModel:
    """A Wan transformer; `overrides` replace entries of its config, e.g. `num_layers=5`."""
    with _seeded(seed):
        return WanTransformer3DModel(**{**TRANSFORMER_CONFIG, **overrides}).eval()


def tiny_wan_pipeline(*, seed: int = 0, **overrides: Any) -> WanPipeline:
    """A text-to-video Wan pipeline; `overrides` replace components or add `WanPipeline` arguments.

    Two experts as in Wan 2.2:
    `tiny_wan_pipeline(transformer_2=tiny_wan_transformer(seed=9), boundary_ratio=0.5)`.
    """
    components: dict[str, Any] = {
        "tokenizer": tiny_tokenizer(),
        "text_encoder": tiny_text_encoder(seed=seed + 1),
        "vae": tiny_wan_vae(seed=seed + 2),
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=3.0),
        "transformer": tiny_wan_transformer(seed=seed),
    }
    pipe = WanPipeline(**{**components, **overrides})
    pipe.set_progress_bar_config(disable=True)
    return pipe


def tiny_wan_vae(*, seed: int = 2) -> AutoencoderKLWan:
    """A Wan VAE that, like the real one, shrinks space by 8 and time by 4."""
    with _seeded(seed):
        return AutoencoderKLWan(
            base_dim=8,
            z_dim=LATENT_CHANNELS,
            dim_mult=[1, 1, 1, 1],
            num_res_blocks=1,
            temperal_downsample=[False, True, True],
            latents_mean=[0.0] * LATENT_CHANNELS,
            latents_std=[1.0] * LATENT_CHANNELS,
        ).eval()


def tiny_text_encoder(*, seed: int = 1) -> UMT5EncoderModel:
    """A UMT5 encoder of one layer whose vocabulary is that of `tiny_tokenizer`."""
    config = UMT5Config(
        vocab_size=len(SPECIAL_TOKENS) + len(WORDS),
        d_model=TEXT_DIM,
        d_kv=16,
        d_ff=64,
        num_layers=1,
        num_heads=2,
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
    )
    with _seeded(seed):
        return UMT5EncoderModel(config).eval()


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token per word; ends each prompt as T5 does."""
    vocabulary = {word: index for index, word in enumerate([*SPECIAL_TOKENS, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", vocabulary["</s>"])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
