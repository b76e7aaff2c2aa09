"""Scores of drafts: what they are larger for, and what of a user's own function is refused."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor, CLIPTokenizer

from chipsparse.cli.batch.scores import MOST_FRAMES, Score, load_score, sharpness
from chipsparse.cli.errors import UserError

FILE = Path("a.png")


def test_sharpness_is_the_variance_of_the_laplacian():
    frames = np.zeros((2, 4, 4, 3), np.uint8)
    frames[1, 1, 1] = 100  # grey, so that its luma is 100
    # Of the four inner pixels one is the centre, and two are its neighbours.
    expected = np.var([-400.0, 100.0, 100.0, 0.0])
    assert sharpness(frames, "") == pytest.approx(expected / 2)
    frames[1, 1, 1] = (100, 0, 0)
    assert sharpness(frames, "") == pytest.approx(expected / 2 * 0.299**2)


def test_a_sharp_picture_scores_higher_than_a_blurred_one():
    sharp = np.random.default_rng(0).integers(0, 256, (1, 32, 32, 3)).astype(np.uint8)
    blurred = (sharp[:, ::2, ::2] // 4 + sharp[:, 1::2, 1::2] // 4).astype(np.uint8)
    assert sharpness(sharp, "") > sharpness(blurred, "") > sharpness(sharp * 0, "") == 0


@pytest.fixture
def clip_folder(tmp_path):
    """A tiny CLIP of random weights that knows a few words."""
    import json

    words = ["a", "red", "blue", "circle"]
    tokens = ["<|startoftext|>", "<|endoftext|>", *words, *(f"{word}</w>" for word in words)]
    tokens += [f"{letter}{end}" for letter in "abcdeilru" for end in ("", "</w>")]
    known = {token: number for number, token in enumerate(dict.fromkeys(tokens))}
    (tmp_path / "vocab.json").write_text(json.dumps(known))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = CLIPTokenizer(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"))
    tokenizer.model_max_length = 8
    layer = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    config = CLIPConfig(
        text_config={
            **layer,
            "vocab_size": len(known),
            "max_position_embeddings": 8,
            "eos_token_id": 1,
            "bos_token_id": 0,
        },
        vision_config={**layer, "image_size": 16, "patch_size": 8},
        projection_dim=8,
    )
    torch.manual_seed(0)
    CLIPModel(config).save_pretrained(tmp_path)
    size = {"height": 16, "width": 16}
    images = CLIPImageProcessor(size={"shortest_edge": 16}, crop_size=size)
    CLIPProcessor(images, tokenizer).save_pretrained(tmp_path)
    return tmp_path


def test_clip_is_the_mean_similarity_of_sampled_frames_and_the_prompt(clip_folder):
    score = load_score(f"clip:{clip_folder}")
    assert score.is_fixed
    frames = np.random.default_rng(0).integers(0, 256, (20, 16, 16, 3)).astype(np.uint8)
    value = score.of(frames, "a red circle", FILE)
    assert -1 <= value <= 1
    assert value == score.of(frames, "a red circle", FILE)
    assert value != score.of(frames, "blue", FILE)
    chosen = np.linspace(0, 19, MOST_FRAMES).round().astype(int)
    alone = [score.of(frames[[number]], "a red circle", FILE) for number in chosen]
    assert value == pytest.approx(np.mean(alone), abs=1e-5)
    assert score.of(frames, "a red circle " * 20, FILE)  # longer than CLIP reads
    # Images with fewer frames than are sampled, and in a size that CLIP does not take.
    assert score.of(np.zeros((1, 40, 24, 3), np.uint8), "a", FILE)


def test_a_function_is_found_in_a_file_and_in_a_module(tmp_path, monkeypatch):
    (tmp_path / "own_score.py").write_text("def f(frames, prompt):\n    return len(prompt)\n")
    monkeypatch.chdir(tmp_path)
    for name in ("own_score:f", f"{tmp_path}/own_score.py:f"):
        score = load_score(name)
        assert (score.of(np.zeros((1, 4, 4, 3), np.uint8), "four", FILE), score.is_fixed) == (
            4,
            False,
        )


def test_an_error_of_a_function_is_one_sentence():
    def broken(frames, prompt):
        raise KeyError("x")

    with pytest.raises(UserError, match=r"^--best f failed for a\.png: 'x'$"):
        Score("f", broken, is_fixed=False).of(np.zeros(1), "", FILE)
