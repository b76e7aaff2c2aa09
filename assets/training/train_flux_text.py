"""Trains the tiny Flux's text encoders from captions alone (four minutes on two CPU cores).

    python train_flux_text.py --out runs/flux_text [--resume] [--seconds 240]

Flow matching hardly teaches a text encoder which colour belongs to which shape, because at most
noise levels the noisy image shows it. So both encoders first learn to say what the image is like,
by linear classifiers, and stay as they are when the transformer trains.

The T5 encoder: the embedding of every word names all properties of the object that the word is
about (or of the background), also those that stand elsewhere in the caption: "red" in "a red
circle to the left of ..." names a circle on the left. The CLIP encoder: the caption's vector names
the background, the number of objects and the places they take.

Writes to OUT: tokenizer/, tokenizer_2/, text_encoder/, text_encoder_2/ (float32), log.csv,
loss.webp and state.pt, from which --resume goes on. At the end it prints how often the classifiers
are right on captions held out, with 64 and with 512 tokens.
"""

from __future__ import annotations

import argparse
import random

import numpy as np
import torch
import torch.nn.functional as F
from common import Log, Ranks, loss_curve
from flux_text import CAPTION_DIM, MAX_WORDS, WORD_DIM, TextEncoders
from scenes import BACKGROUND_COLOURS, BACKGROUNDS, FILLS, OBJECT_COLOURS, SHAPES
from still_captions import describe_still_with_owners
from still_scenes import LAYOUTS, MAX_THINGS, PLACES, RADII, Still, sample_still
from torch import Tensor, nn
from training import Training, add_run_arguments

THING_PROPERTIES = {
    "shape": SHAPES,
    "colour": tuple(OBJECT_COLOURS),
    "fill": FILLS,
    "size": tuple(RADII),
    "place": tuple(PLACES),
}
WORD_CLASSES = [*map(len, THING_PROPERTIES.values()), len(BACKGROUNDS), len(BACKGROUND_COLOURS)]
ALL_LAYOUTS = [frozenset(places) for layouts in LAYOUTS.values() for places in layouts]
CAPTION_CLASSES = [len(BACKGROUNDS), len(BACKGROUND_COLOURS), MAX_THINGS, len(ALL_LAYOUTS)]
NOTHING = -100  # `cross_entropy` leaves these out
# Tokens of a training batch, mostly few; 512 is `FluxPipeline`'s default.
LENGTHS, LENGTH_WEIGHTS = (40, MAX_WORDS, 128, 512), (10, 4, 1, 1)


def word_classes(still: Still, owners: list[int | None], *, words: int) -> list[list[int]]:
    """The classes of each of `words` tokens, in the order of `WORD_CLASSES`."""
    kinds = len(THING_PROPERTIES)
    rows = [[NOTHING] * len(WORD_CLASSES) for _ in range(words)]
    for row, owner in zip(rows, owners, strict=False):
        if owner == MAX_THINGS:
            row[kinds:] = background_classes(still)
        elif owner is not None:
            thing = still.things[owner]
            row[:kinds] = [v.index(getattr(thing, k)) for k, v in THING_PROPERTIES.items()]
    return rows


def background_classes(still: Still) -> list[int]:
    """The kind and the colour of a still's background."""
    colours = list(BACKGROUND_COLOURS)
    return [BACKGROUNDS.index(still.background), colours.index(still.background_colour)]


def caption_classes(still: Still) -> list[int]:
    """The classes of a whole caption, in the order of `CAPTION_CLASSES`."""
    layout = ALL_LAYOUTS.index(frozenset(thing.place for thing in still.things))
    return [*background_classes(still), len(still.things) - 1, layout]


class Student(nn.Module):
    """The text encoders and the classifiers that read them."""

    def __init__(self) -> None:
        super().__init__()
        self.encoders = TextEncoders()
        self.word_classifier = nn.Linear(WORD_DIM, sum(WORD_CLASSES))
        self.caption_classifier = nn.Linear(CAPTION_DIM, sum(CAPTION_CLASSES))

    def forward(self, rng: np.random.Generator, *, batch: int, words: int) -> tuple[Tensor, Tensor]:
        """Loss and share of right answers over all properties of `batch` fresh captions."""
        stills = [sample_still(rng) for _ in range(batch)]
        captions, owners = zip(*(describe_still_with_owners(s, rng) for s in stills), strict=True)
        asked_words = torch.tensor(
            [word_classes(s, o, words=words) for s, o in zip(stills, owners, strict=True)]
        ).flatten(0, 1)
        asked_captions = torch.tensor([caption_classes(s) for s in stills])
        clip_ids, t5_ids = self.encoders.tokenize(list(captions), words=words)
        # all that follows </s> hardly matters to a causal encoder, which saves time here
        vectors, hidden = self.encoders(clip_ids[:, : MAX_WORDS - 16], t5_ids)
        given = asked_words.ne(NOTHING).any(-1)
        answers = [
            *self.word_classifier(hidden.flatten(0, 1)[given]).split(WORD_CLASSES, -1),
            *self.caption_classifier(vectors).split(CAPTION_CLASSES, -1),
        ]
        asked = [*asked_words[given].unbind(-1), *asked_captions.unbind(-1)]
        pairs = list(zip(answers, asked, strict=True))
        loss = torch.stack([F.cross_entropy(a, c, ignore_index=NOTHING) for a, c in pairs]).sum()
        right = [(a.argmax(-1) == c)[c != NOTHING].float().mean() for a, c in pairs]
        return loss, torch.stack(right)


@torch.no_grad()
def examine(student: Student, *, words: int, batch: int) -> str:
    """The share of right answers per property, on captions that no training run draws."""
    _, right = student(np.random.default_rng([1, 0]), batch=batch, words=words)
    names = [*THING_PROPERTIES, "background", "its colour", "background (CLIP)", "its colour"]
    names += ["objects (CLIP)", "places (CLIP)"]
    return ", ".join(f"{n} {r:.2%}" for n, r in zip(names, right.tolist(), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_run_arguments(parser, steps=100_000, seconds=240.0)
    parser.add_argument("--batch", type=int, default=96)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--test-captions", type=int, default=1024)
    args = parser.parse_args()

    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    student = Student()
    optimizer = torch.optim.AdamW(
        student.parameters(), lr=args.lr, betas=(0.9, 0.99), weight_decay=0.0
    )
    training = Training(
        student, [optimizer], args, warmup=50, decay_from=0.3, ema=0.0, ranks=Ranks()
    )
    schedule = training.schedule
    log = Log(args.out / "log.csv", fields=("step", "seconds", "loss", "right"))
    recent = []
    while schedule.running:
        words = random.Random(training.step).choices(LENGTHS, LENGTH_WEIGHTS)[0]
        batch = max(8, args.batch * LENGTHS[0] // words)
        rng = np.random.default_rng([0, training.step])
        loss, right = student(rng, batch=batch, words=words)
        training.update(loss)
        recent.append(torch.stack([loss.detach(), right.mean()]))
        if training.step % 50 == 0:
            loss_, right_ = torch.stack(recent).mean(0).tolist()
            log.add(step=training.step, seconds=schedule.spent, loss=loss_, right=right_)
            recent = []

    print(f"{training.step} steps, {schedule.spent:.0f} s")
    training.save(args.out)
    student.encoders.save(args.out)
    loss_curve(log.path, args.out / "loss.webp", field="loss", title="Naming loss")
    for words, batch in ((MAX_WORDS, args.test_captions), (512, args.test_captions // 8)):
        print(f"{words} tokens: {examine(student, words=words, batch=batch)}")


if __name__ == "__main__":
    main()
