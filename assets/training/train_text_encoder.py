"""Teaches a fresh text encoder the order of words, from captions alone (two minutes on a CPU).

    python train_text_encoder.py --start runs/first --out runs/text [--steps 1500]

Flow matching hardly teaches it: at most noise levels the noisy clip itself shows which colour
belongs where, and an encoder that begins as a bag of words stays one. So the encoder first learns
to say what each part of the scene is like: one fixed query per property ("the first object's
colour", "the background's kind") attends to the words' embeddings, just as the transformer's
cross-attention will, and a linear layer must name the property. And from each word's embedding
alone a linear layer must name every property of what the word is about, so that whatever finds one
word of an object knows the whole object: without this, two objects exchange shapes and colours. It
must name how many objects there are, too: without this, one object is often drawn twice.

The embeddings are also kept near those of the text encoder in START, which the transformer
already reads. OUT gets a copy of START with the new text encoder, to `--start` the transformer.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from captions import describe_with_owners
from scenes import (
    BACKGROUND_COLOURS,
    BACKGROUNDS,
    FILLS,
    MAX_OBJECTS,
    MOTIONS,
    OBJECT_COLOURS,
    SHAPES,
    SIZES,
    Scene,
    sample_scene,
)
from text import TEXT_DIM, new_text_encoder, new_tokenizer
from torch import Tensor, nn
from transformers import UMT5EncoderModel

OBJECT_PROPERTIES: dict[str, tuple[str | None, ...]] = {  # None: there is no such object
    "shape": (*SHAPES, None),
    "colour": (*OBJECT_COLOURS, None),
    "fill": (*FILLS, None),
    "size": (*SIZES, None),
    "motion": (*MOTIONS, None),
}
CLASSES = [
    *[len(values) for _ in range(MAX_OBJECTS) for values in OBJECT_PROPERTIES.values()],
    len(BACKGROUNDS),
    len(BACKGROUND_COLOURS),
]


def properties(scene: Scene) -> list[int]:
    """The class of every property of a scene, in the order of `CLASSES`."""
    found = [
        values.index(getattr(scene.objects[i], name) if i < len(scene.objects) else None)
        for i in range(MAX_OBJECTS)
        for name, values in OBJECT_PROPERTIES.items()
    ]
    found.append(BACKGROUNDS.index(scene.background))
    found.append(list(BACKGROUND_COLOURS).index(scene.background_colour))
    return found


def word_properties(scene: Scene, owners: list[int | None], words: int) -> Tensor:
    """Classes (words, properties) of what each word is about; -100 where a property has none.

    The properties are those of an object, then the background's kind and colour, then the number
    of objects, which every word knows.
    """
    found = properties(scene)
    object_count = len(OBJECT_PROPERTIES)
    classes = torch.full((words, object_count + 3), -100)
    classes[: len(owners), -1] = len(scene.objects)
    for word, owner in enumerate(owners):
        if owner == MAX_OBJECTS:
            classes[word, object_count:-1] = torch.tensor(found[-2:])
        elif owner is not None:
            first = owner * object_count
            classes[word, :object_count] = torch.tensor(found[first : first + object_count])
    return classes


class Probe(nn.Module):
    """One query and one linear classifier per property, and one classifier for words' own ones."""

    def __init__(self) -> None:
        super().__init__()
        word_classes = [*CLASSES[: len(OBJECT_PROPERTIES)], *CLASSES[-2:], MAX_OBJECTS + 1]
        self.queries = nn.Parameter(0.05 * torch.randn(len(CLASSES), TEXT_DIM))
        self.classifiers = nn.ModuleList([nn.Linear(TEXT_DIM, count) for count in CLASSES])
        self.of_words = nn.ModuleList([nn.Linear(TEXT_DIM, count) for count in word_classes])

    def forward(self, hidden: Tensor, mask: Tensor) -> list[Tensor]:
        """hidden (B, words, TEXT_DIM), mask (B, words) to one (B, classes) per property."""
        scores = (hidden @ self.queries.T).mT.masked_fill(~mask[:, None], -torch.inf)
        read = scores.softmax(-1) @ hidden
        return [classify(read[:, i]) for i, classify in enumerate(self.classifiers)]

    def words(self, hidden: Tensor) -> list[Tensor]:
        """hidden (B, words, TEXT_DIM) to one (B, classes, words) per property of a word's owner."""
        return [classify(hidden).mT for classify in self.of_words]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--start", type=Path, required=True, help="transformer and text_encoder")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--go-on", action="store_true", help="begin with START's text encoder")
    parser.add_argument("--nearness", type=float, default=1.0, help="weight of staying near START")
    args = parser.parse_args()

    torch.manual_seed(0)
    rng = np.random.default_rng(7)
    tokenizer, probe = new_tokenizer(), Probe()
    encoder = new_text_encoder(tokenizer)
    known = UMT5EncoderModel.from_pretrained(args.start / "text_encoder").float().eval()
    if args.go_on:
        encoder.load_state_dict(known.state_dict())
    optimizer = torch.optim.AdamW(
        [{"params": encoder.parameters(), "lr": 1e-3}, {"params": probe.parameters(), "lr": 3e-3}],
        betas=(0.9, 0.99),
        weight_decay=0.0,
    )
    decay = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 50) * max(0.03, 1.0 - step / args.steps)
    )
    for step in range(1, args.steps + 1):
        scenes = [sample_scene(rng) for _ in range(args.batch)]
        captions, owners = map(
            list, zip(*(describe_with_owners(scene, rng) for scene in scenes), strict=True)
        )
        captions[0], owners[0] = "", []  # the unconditional caption keeps its embedding
        tokens = tokenizer(captions, padding=True, return_tensors="pt")
        mask = tokens.attention_mask.bool()
        hidden = encoder(tokens.input_ids, tokens.attention_mask).last_hidden_state
        with torch.no_grad():
            old = known(tokens.input_ids, tokens.attention_mask).last_hidden_state
        classes = torch.tensor([properties(scene) for scene in scenes])
        answers = probe(hidden, mask)
        naming = sum(F.cross_entropy(a[1:], classes[1:, i]) for i, a in enumerate(answers))
        words = hidden.shape[1]
        of_words = torch.stack(
            [word_properties(*pair, words) for pair in zip(scenes, owners, strict=True)]
        )
        word_answers = probe.words(hidden)
        binding = sum(F.cross_entropy(a, of_words[..., i]) for i, a in enumerate(word_answers))
        drift = (hidden - old)[mask].pow(2).mean() / old[mask].var()
        optimizer.zero_grad()
        (naming + binding + args.nearness * drift).backward()
        torch.nn.utils.clip_grad_norm_(encoder.parameters(), 1.0)
        optimizer.step()
        decay.step()
        if step % 100 == 0:
            right = [(a[1:].argmax(-1) == classes[1:, i]).float() for i, a in enumerate(answers)]
            accuracy = torch.stack(right).mean().item()
            asked = of_words != -100
            hits = torch.stack([a.argmax(1) for a in word_answers], -1) == of_words
            print(
                f"{step} naming {naming:.3f} binding {binding:.3f} drift {drift:.3f} "
                f"right {accuracy:.1%} of words {hits[asked].float().mean():.1%}",
                flush=True,
            )

    shutil.copytree(args.start, args.out, dirs_exist_ok=True)
    encoder.save_pretrained(args.out / "text_encoder")


if __name__ == "__main__":
    main()
