"""What of a prompt is not read is said."""

from types import SimpleNamespace

import pytest

from chipsparse.cli.prompts import cut_text
from tests.tiny_models import WORDS, tiny_tokenizer


def words(count):
    return " ".join(WORDS[index % len(WORDS)] for index in range(count))


def pipe(**tokenizers):
    return SimpleNamespace(components={"vae": object(), "text_encoder": None, **tokenizers})


@pytest.mark.parametrize(("count", "cut"), [(0, None), (15, None), (16, 1), (20, 5)])
def test_words_beyond_the_limit(count, cut):
    """Of 16 tokens the last one ends the prompt."""
    text = cut_text(pipe(tokenizer=tiny_tokenizer()), words(count), 16)
    if cut is None:
        assert text is None
        return
    lost = words(count).split()[-cut:]
    assert text == (
        "the prompt is longer than the 16 tokens that the text encoder reads; cut: "
        f'"{" ".join(lost)}"'
    )


def test_words_that_the_encoder_does_not_know():
    text = cut_text(pipe(tokenizer=tiny_tokenizer()), " ".join(["unheard"] * 17), 16)
    assert text.endswith('cut: "2 unknown words"')


def test_a_tokenizer_with_a_limit_of_its_own():
    short = tiny_tokenizer(model_max_length=4)
    assert "the 4 tokens" in cut_text(pipe(tokenizer=short), words(8), None)
    assert "the 4 tokens" in cut_text(pipe(tokenizer=short), words(8), 16)


def test_of_several_encoders_the_one_that_reads_most_counts():
    both = pipe(tokenizer=tiny_tokenizer(model_max_length=4), tokenizer_2=tiny_tokenizer())
    assert cut_text(both, words(8), 16) is None
    assert "the 16 tokens" in cut_text(both, words(30), 16)


def test_without_limit_nothing_is_cut():
    assert cut_text(pipe(tokenizer=tiny_tokenizer()), words(5000), None) is None


def test_long_remainders_are_shortened():
    text = cut_text(pipe(tokenizer=tiny_tokenizer()), words(200), 16)
    assert text.endswith(' ..."')
    assert len(text) < 200


def test_the_command_says_so(generate):
    ran = generate("-o", "o.png", "--frames", "1", "--json", prompt=words(20))
    (warning,) = ran.json()["warnings"]
    assert "longer than the 16 tokens" in warning
    assert f"chipsparse: warning: {warning}\n" in ran.stderr
