"""The tokenizer (whole words of the grammar) and the small text encoder that reads it."""

from __future__ import annotations

import torch.nn.functional as F
from captions import vocabulary
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import Tensor
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

PAD, EOS, UNKNOWN = "<pad>", "</s>", "<unk>"
TEXT_DIM = 128
MAX_WORDS = 40  # more than any caption of the grammar, its </s> included


def new_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer of clips' captions."""
    return whole_words([PAD, EOS, UNKNOWN, *vocabulary()], max_length=512)


def whole_words(
    words: list[str], *, max_length: int, begin: str | None = None, prepend: bool = False
) -> PreTrainedTokenizerFast:
    """Lower-cases, splits into words and marks, ends with </s>; other words become <unk>.

    `words` are the words and special tokens in the order of their ids, `begin` one that begins a
    text; `prepend` puts it there.
    """
    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=UNKNOWN)
    )
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A {EOS}" if prepend else f"$A {EOS}",
        special_tokens=[(token, words.index(token)) for token in (EOS, begin) if token],
    )
    beginning = {"bos_token": begin} if begin else {}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        **beginning,
        eos_token=EOS,
        unk_token=UNKNOWN,
        model_max_length=max_length,
        padding_side="right",
    )


def new_text_encoder(tokenizer: PreTrainedTokenizerFast) -> UMT5EncoderModel:
    """Two layers with fresh weights."""
    text_encoder = UMT5EncoderModel(
        UMT5Config(
            vocab_size=len(tokenizer),
            d_model=TEXT_DIM,
            d_kv=32,
            d_ff=256,
            num_layers=2,
            num_heads=4,
            relative_attention_num_buckets=32,
            relative_attention_max_distance=64,
            dropout_rate=0.0,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            decoder_start_token_id=tokenizer.pad_token_id,
        )
    )
    look_at_neighbours(text_encoder)
    return text_encoder


def look_at_neighbours(text_encoder: UMT5EncoderModel) -> None:
    """Has each attention head look at the word a given number of places away, to begin with.

    The loss alone hardly teaches the order of words: for most noise levels the noisy clip itself
    shows which colour belongs where. An encoder that starts without it stays a bag of words, and
    "a red circle over a blue gradient" as often as not comes out as a blue circle over red.
    """
    half = text_encoder.config.relative_attention_num_buckets // 2  # words to come count from here
    for block in text_encoder.encoder.block:
        bias = block.layer[0].SelfAttention.relative_attention_bias.weight.data  # (buckets, heads)
        bias.zero_()
        for head, bucket in enumerate((half + 1, half + 2, 1, 2)):
            bias[bucket, head] = 4.0


def tokenize(tokenizer: PreTrainedTokenizerFast, captions: list[str]) -> Tensor:
    """Token ids (B, MAX_WORDS), padded, as `WanPipeline` makes them."""
    return tokenizer(
        captions,
        padding="max_length",
        max_length=MAX_WORDS,
        truncation=True,
        return_tensors="pt",
    ).input_ids


def embed(text_encoder: UMT5EncoderModel, ids: Tensor, *, length: int) -> Tensor:
    """Embeddings (B, length, TEXT_DIM), zeros in place of padding, as `WanPipeline` makes them."""
    mask = ids.ne(text_encoder.config.pad_token_id)
    hidden = text_encoder(ids, mask).last_hidden_state * mask[:, :, None]
    return F.pad(hidden, (0, 0, 0, length - ids.shape[1]))
