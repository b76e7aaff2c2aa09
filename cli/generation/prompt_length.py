"""What of a prompt the text encoder does not read."""

from __future__ import annotations

import textwrap
from typing import Any

from chipsparse.cli.wording import counted

SHOWN = 80  # letters of what is cut
# A tokenizer without a limit of its own says a number like 1e30.
NO_LIMIT = 1_000_000


def cut_text(pipe: Any, prompt: str, max_sequence_length: int | None) -> str | None:
    """One sentence about what is cut from a prompt, or None where all of it is read.

    Of several text encoders the one that reads most counts.

    Args:
        pipe: loaded; its tokenizers are asked.
        max_sequence_length: what the pipeline's call is given, or its default.
    """
    from transformers import PreTrainedTokenizerBase

    best: tuple[int, str] | None = None
    for tokenizer in pipe.components.values():
        if not isinstance(tokenizer, PreTrainedTokenizerBase):
            continue
        limit = _limit(tokenizer, max_sequence_length)
        if limit is None:
            return None
        words = tokenizer(prompt, add_special_tokens=False, verbose=False).input_ids
        room = limit - tokenizer.num_special_tokens_to_add()
        if len(words) <= room:
            return None
        lost = tokenizer.decode(words[room:], skip_special_tokens=True).strip()
        if best is None or limit > best[0]:
            best = limit, lost or counted(len(words) - room, "unknown word")
    if best is None:
        return None
    limit, lost = best
    shown = textwrap.shorten(lost, SHOWN, placeholder=" ...")
    return (
        f'the prompt is longer than the {limit} tokens that the text encoder reads; cut: "{shown}"'
    )


def _limit(tokenizer: Any, max_sequence_length: int | None) -> int | None:
    own = getattr(tokenizer, "model_max_length", None)
    limits = [limit for limit in (own, max_sequence_length) if limit and limit < NO_LIMIT]
    return min(limits, default=None)
