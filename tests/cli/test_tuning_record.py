"""The record of a results file of `tune`, of made-up measurements."""

from pathlib import Path

from chipsparse.cli.pages.records import read_record
from chipsparse.cli.pages.tuning_record import Tuning
from chipsparse.cli.tune.names import dense_name, pair_name

PROMPTS = ["seed 0, a cat", "seed 1, a dog", "seed 2, a cow"]


def a_pair(psnr_db, seconds):
    return {
        "psnr_db": psnr_db,
        "ssim": None,
        "lpips": None,
        "seconds": seconds,
        "actions": ["dense", "skip"],
        "form": "1 of 2 steps in full",
    }


def test_the_headline_is_that_of_the_held_out_prompts():
    """The chosen config was tried on those that calibrate, too, and may be worse there."""
    pairs = zip(PROMPTS, [(20.0, 9.0), (31.0, 5.0), (30.0, 5.0)], strict=True)
    content = {
        "about": {},
        "measured": {
            **{dense_name(prompt): {"seconds": 10.0} for prompt in PROMPTS},
            **{pair_name("abc", name, lpips=False): a_pair(*values) for name, values in pairs},
        },
        "searches": {
            "min_psnr_db 30": {
                "target": {"min_psnr_db": 30.0},
                "held_out": PROMPTS[1:],
                "chosen": {
                    "config": "abc",
                    "form": "1 of 2 steps in full",
                    "density": 0.2,
                    "actions": ["dense", "skip"],
                },
            }
        },
    }
    _, best = read_record(Tuning, Path("f.json"), content).best
    assert best.psnrs == [31.0, 30.0]
    assert best.speedup == 2.0
