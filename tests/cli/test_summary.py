"""How numbers are shown."""

import io
import math
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from chipsparse.cli.generate import summary
from chipsparse.cli.results import json_values
from chipsparse.cli.wording import seconds_text
from chipsparse.experiments.clips import Generation, StepResult


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0041, "4.1 ms"),
        (0.1, "0.10 s"),
        (59.5, "59.50 s"),
        (60, "1 min 0 s"),
        (119.7, "2 min 0 s"),
    ],
)
def test_seconds(seconds, text):
    assert seconds_text(seconds) == text


def test_what_ran_dense_counts_as_computed_and_what_was_skipped_does_not():
    actions = [("dense", None), ("refresh+sparse", 0.2), ("skip", None), ("sparse", None)]
    steps = [StepResult(i, action, 1.0, kept, kept) for i, (action, kept) in enumerate(actions)]
    assert summary._row("all", steps) == ["all", "4", "1.00 s", "55.0%", "55.0%"]
    assert summary._letters(steps) == "DRkS"


@pytest.mark.parametrize(
    ("host_bytes", "text"),
    [(0, "caches 43.20 GiB"), (41 << 30, "caches 43.20 GiB (41.00 GiB in host memory)")],
)
def test_what_of_the_caches_was_in_host_memory(host_bytes, text):
    made = Generation(
        frames=np.zeros((1, 2, 2, 3), np.uint8),
        steps=[],
        denoising_seconds=1.0,
        total_seconds=1.0,
        peak_gpu_bytes=None,
        cache_bytes=round(43.2 * (1 << 30)),
        host_bytes=host_bytes,
        backends={},
        backend_reasons=[],
        fallbacks=[],
        notes=[],
    )
    outcome = summary.Outcome({}, sparse=made, peak_process_bytes=None)
    assert summary._memory(outcome) == text
    assert json_values(outcome)["sparse"]["host_bytes"] == host_bytes


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"work_share": 0.435}, "about 56% fewer operations than dense (estimated"),
        ({"work_share": 1.0}, "none: nothing ran sparse"),
        ({"work_share": None}, "not known; --compare measures it"),
        ({"work_share": 0.9, "nothing_sparse": "why"}, "none: nothing ran sparse"),
    ],
)
def test_the_gain_without_a_dense_run(changes, text):
    made = Generation(
        np.zeros((1, 2, 2, 3), np.uint8), [], 1.0, 1.0, None, 0, 0, {}, [], [], [], **changes
    )
    outcome = summary.Outcome({}, sparse=made, peak_process_bytes=None)
    assert summary._gain([outcome]).startswith(text)
    assert summary._gain([outcome, outcome]).startswith(text)
    dense = summary.Outcome({}, dense=made)
    assert summary._gain([dense]) == "none: the unpatched model ran"


def of_a_series(
    seed, prompt="a red circle", work_share=0.4, *, speedup=None, psnr_db=30.0, frames=33
):
    """An outcome as `generate --num` has it, of numbered frames."""
    made = Generation(
        *(np.zeros((frames, 64, 64, 3), np.uint8), [StepResult(0, "dense", 1.0, None, None)]),
        *(12.0, 15.0, None, 0, 0, {}, [], [], []),
        work_share=work_share,
    )
    settings = {"num_frames": frames, "num_inference_steps": 1, "guidance_scale": 4.0}
    request = {
        **{
            "model": "m",
            "prompt": prompt,
            "seed": seed,
            "profile": None,
            "quality": None,
            "loras": [],
        },
        **{"scheduler": None, "flow_shift": None, "image": None, "strength": None},
        "warnings": [],
        **{"dtype": "float32", "device": "cpu", "settings": settings | {"true_cfg_scale": None}},
    }
    files = [Path(f"renders/monday-{seed:03}-{frame:03}.png") for frame in range(frames)]
    compared = None if speedup is None else summary.Comparison(speedup, psnr_db, 0.9)
    return summary.Outcome(request, {"output": files}, made, made, compared, None)


def printed(outcomes):
    console = Console(width=80, file=io.StringIO())
    summary.print_series(outcomes, console, asked=len(outcomes), verbose=False)
    return [line.strip() for line in console.file.getvalue().splitlines()]


def test_a_series_of_seeds_leads_with_gain_time_and_prompt():
    lines = printed([of_a_series(0), of_a_series(1, work_share=0.45)])
    assert lines[1:6] == [
        "clips   2 of 2 made",
        "gain    about 55% to 60% fewer operations than dense (estimated; --compare",
        "measures the speed-up)",
        "time    30.00 s for 2 clips with text and decoding",
        "prompt  a red circle",
    ]
    assert ["written", "seed", "time"] in [line.split() for line in lines]


def test_a_series_that_was_compared_tells_its_worst_picture():
    lines = printed([of_a_series(0, speedup=2.0), of_a_series(1, speedup=1.5, psnr_db=28.0)])
    assert lines[2:4] == [
        "gain    1.50 to 2.00 times as fast as dense; at worst PSNR 28.00 dB, SSIM",
        "0.9000",
    ]
    same = printed([of_a_series(seed, speedup=2.0, psnr_db=math.inf) for seed in (0, 1)])
    assert same[2] == "gain    2.00 times as fast as dense; the same frames as dense"


def test_prompts_of_a_series_can_be_read_in_a_narrow_terminal():
    """Names of frames, seeds, times and qualities take 77 columns of 80."""
    prompts = ("a red circle moves over a blue gradient", "a green star")
    lines = printed([of_a_series(i, text, speedup=2.0) for i, text in enumerate(prompts)])
    assert any(line.endswith("a red circle moves") for line in lines)
    assert any(line.endswith("a green star") for line in lines)


def test_places_that_come_with_chipsparse(tmp_path):
    from chipsparse.cli.wording import bundled_name, counted, short_place
    from chipsparse.profiles.profile import ASSETS

    assert bundled_name(str(ASSETS / "tiny-wan")) == "tiny-wan"
    assert bundled_name(str(ASSETS.resolve() / "tiny-wan")) == "tiny-wan"
    assert bundled_name("owner/name") is None
    assert short_place(str(tmp_path)) == str(tmp_path)
    assert [counted(n, "step") for n in (0, 1, 2000)] == ["0 steps", "1 step", "2,000 steps"]
