"""The tiny Flux's two tokenizers (whole words of the grammar) and its two text encoders.

As in every `FluxPipeline`, a CLIP encoder gives one vector for the whole caption and a T5 encoder
one embedding per token; neither gets a mask, so both must read past their padding.
"""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file, save_file
from still_captions import still_vocabulary
from text import EOS, PAD, UNKNOWN, whole_words
from torch import Tensor, nn
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5EncoderModel,
)

BEGIN = "<s>"
SPECIAL = (PAD, EOS, BEGIN, UNKNOWN)
WORD_DIM = 128  # of the T5 encoder, the transformer's joint_attention_dim
CAPTION_DIM = 128  # of the CLIP encoder, the transformer's pooled_projection_dim
CLIP_WORDS = 77
MAX_WORDS = 64  # more than any caption of the grammar, its </s> included


def new_tokenizer(*, for_clip: bool) -> PreTrainedTokenizerFast:
    """The tokenizer of stills' captions; for CLIP they begin with <s> and have 77 tokens."""
    return whole_words(
        [*SPECIAL, *still_vocabulary()],
        max_length=CLIP_WORDS if for_clip else 512,
        begin=BEGIN,
        prepend=for_clip,
    )


def new_clip_encoder() -> CLIPTextModel:
    """Two causal layers with fresh weights; the caption's vector is that of </s>."""
    return CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(SPECIAL) + len(still_vocabulary()),
            hidden_size=CAPTION_DIM,
            intermediate_size=256,
            projection_dim=CAPTION_DIM,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=CLIP_WORDS,
            hidden_act="gelu",
            initializer_factor=1.0,
            pad_token_id=SPECIAL.index(PAD),
            bos_token_id=SPECIAL.index(BEGIN),
            eos_token_id=SPECIAL.index(EOS),
        )
    )


def new_t5_encoder() -> T5EncoderModel:
    """Three layers with fresh weights."""
    return T5EncoderModel(
        T5Config(
            vocab_size=len(SPECIAL) + len(still_vocabulary()),
            d_model=WORD_DIM,
            d_kv=32,
            d_ff=256,
            num_layers=3,
            num_heads=4,
            relative_attention_num_buckets=32,
            relative_attention_max_distance=64,
            dropout_rate=0.0,
            feed_forward_proj="gated-gelu",
            pad_token_id=SPECIAL.index(PAD),
            eos_token_id=SPECIAL.index(EOS),
            decoder_start_token_id=SPECIAL.index(PAD),
        )
    )


def use_checkpoint_names(folder: Path) -> None:
    """Renames the weights of a saved `CLIPTextModel` to what published checkpoints call them.

    transformers 5 leaves out the prefix when it saves, and 4 then finds no weights; both read this.
    """
    path = folder / "model.safetensors"
    weights = load_file(path)
    prefix = "text_model."
    weights = {f"{prefix}{name.removeprefix(prefix)}": value for name, value in weights.items()}
    save_file(weights, path, metadata={"format": "pt"})


class TextEncoders(nn.Module):
    """Both tokenizers and both encoders."""

    def __init__(self) -> None:
        super().__init__()
        self.clip_tokenizer = new_tokenizer(for_clip=True)
        self.t5_tokenizer = new_tokenizer(for_clip=False)
        self.clip = new_clip_encoder()
        self.t5 = new_t5_encoder()

    @classmethod
    def load(cls, folder: Path) -> TextEncoders:
        """What `save` wrote, with plain attention (captions are short).

        Raises `ValueError` if the grammar has got other words since.
        """
        encoders = cls()
        saved = PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer_2").get_vocab()
        if saved != encoders.t5_tokenizer.get_vocab():
            other = sorted(saved.keys() ^ encoders.t5_tokenizer.get_vocab().keys())
            raise ValueError(f"{folder} was trained with another vocabulary; it differs in {other}")
        for name in ("clip", "t5"):
            part = type(getattr(encoders, name))
            path = folder / ("text_encoder" if name == "clip" else "text_encoder_2")
            loaded, info = part.from_pretrained(
                path, output_loading_info=True, attn_implementation="eager"
            )
            if info["missing_keys"]:
                raise ValueError(f"{path} has no weights called {sorted(info['missing_keys'])}")
            setattr(encoders, name, loaded.float())
        return encoders.eval().requires_grad_(False)

    def save(self, folder: Path) -> None:
        """Writes the four folders of the parts, named as in a `FluxPipeline`."""
        self.clip_tokenizer.save_pretrained(folder / "tokenizer")
        self.t5_tokenizer.save_pretrained(folder / "tokenizer_2")
        self.clip.save_pretrained(folder / "text_encoder")
        use_checkpoint_names(folder / "text_encoder")
        self.t5.save_pretrained(folder / "text_encoder_2")

    def tokenize(self, captions: list[str], *, words: int = MAX_WORDS) -> tuple[Tensor, Tensor]:
        """Ids for CLIP (B, 77) and for T5 (B, words), padded, as `FluxPipeline` makes them."""
        clip, t5 = (
            tokenizer(
                captions,
                padding="max_length",
                max_length=length,
                truncation=True,
                return_tensors="pt",
            ).input_ids
            for tokenizer, length in ((self.clip_tokenizer, CLIP_WORDS), (self.t5_tokenizer, words))
        )
        return clip, t5

    def forward(self, clip_ids: Tensor, t5_ids: Tensor) -> tuple[Tensor, Tensor]:
        """The captions' vectors (B, CAPTION_DIM) and their words' (B, words, WORD_DIM)."""
        return self.clip(clip_ids).pooler_output, self.t5(t5_ids).last_hidden_state
