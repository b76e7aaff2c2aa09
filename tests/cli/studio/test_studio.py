"""The work behind the page: the same bits as `generate`, previews, stops that hold, refusals."""

import json
import threading
import time
from contextlib import closing
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline

from chipsparse import load_profile
from chipsparse.cli.media.read import read_clip
from chipsparse.cli.studio.options import StudioOptions
from chipsparse.cli.studio.preview import Preview, arrange
from chipsparse.cli.studio.run import KEPT, STOPPED, WAITING, Live, Studio
from chipsparse.experiments import clips
from tests.cli.html_reader import PageReader
from tests.tiny_models import PROMPT

SECONDS = 120
RUNS = {"sparse": ["dense", "refresh", "sparse", "sparse"], "dense": ["dense"] * 4}


@pytest.fixture(scope="module")
def studio(flux_folder, tmp_path_factory):
    options = StudioOptions(model=str(flux_folder), device="cpu")
    with closing(Studio(options, tmp_path_factory.mktemp("studio"))) as studio:
        yield studio


@pytest.fixture(scope="module")
def make(studio, flux_folder):
    """Makes what some fields ask for, and gives it at its end."""

    def run(**fields):
        chosen = {"model": str(flux_folder), "prompt": PROMPT, "seed": 3, "compare": True} | fields
        return ended(studio.start(chosen))

    return run


def ended(live):
    end = time.monotonic() + SECONDS
    while not live.ended:
        assert time.monotonic() < end
        time.sleep(0.01)
    return live


@pytest.fixture(scope="module")
def watched():
    """Calls a function with each generation whenever it shows something."""
    with pytest.MonkeyPatch.context() as patch:
        show, watch = Live.show, SimpleNamespace(then=lambda live: None)

        def watching(live, *given, **named):
            show(live, *given, **named)
            watch.then(live)

        patch.setattr(Live, "show", watching)
        yield watch


@pytest.fixture(scope="module")
def made(make, watched):
    """A generation, and what it showed: number of runs, steps of the last one, and preview."""
    seen = []

    def watch(live):
        if live.preview is not None:
            seen.append((len(live.runs), [*live.runs[-1].actions], live.preview.shape))

    watched.then = watch
    return make(), seen


def test_clips_are_those_of_generate(made, generate, flux_folder, workdir):
    live, seen = made
    words = ("--compare", "--seed", "3", "-o", "out.png", "--json", "--device", "cpu")
    comparison = json.loads(generate(*words, model=flux_folder).stdout)["comparison"]
    for way, name in (("sparse", "out.png"), ("dense", "out-dense.png")):
        pixels = read_clip(workdir / name).frames
        assert np.array_equal(live.made[way].frames, pixels)
        assert np.array_equal(read_clip(live.clips[way]).frames, pixels)
    for name in ("psnr_db", "ssim"):
        assert getattr(live.quality, name) == comparison[name]
    assert {"--compare", "--seed", PROMPT} <= set(live.command)
    # Every step was shown, with a preview: 32x48 pixels, two to one.
    assert {run.way: run.actions for run in live.runs} == RUNS
    assert {run.way: run.planned for run in live.runs} == RUNS
    assert seen == [
        (number, actions[: steps + 1], (1, 16, 24, 3))
        for number, actions in enumerate(RUNS.values(), 1)
        for steps in range(4)
    ]
    # The profile that is saved gives the same clip.
    saved = load_profile(live.profile)
    assert saved.sparsity == load_profile(flux_folder / "chipsparse.yaml").sparsity
    assert yaml.safe_load(live.profile.read_text())["generation"]["height"] == 32
    words = ("--config", str(live.profile), "--seed", "3", "-o", "again.png", "--device", "cpu")
    generate(*words, model=flux_folder)
    assert np.array_equal(read_clip(workdir / "again.png").frames, live.made["sparse"].frames)


def test_a_dense_clip_is_made_once_and_none_that_does_not_fit(made, make):
    again = make()
    assert again.made["dense"] is made[0].made["dense"]
    assert [run.way for run in again.runs] == ["sparse"]
    assert KEPT in again.notes
    other = make(seed=4, compare=False)
    assert ([*other.made], other.quality, KEPT in other.notes) == (["sparse"], None, False)
    sentence, end = "--height 33 does not fit this model", make(height=33)
    assert sentence in end.error
    assert sentence in end.html()


def test_stopping(made, make, watched, studio, flux_folder, monkeypatch):
    def stop_at(runs, steps):
        """Presses Stop when so many runs have begun, and the last one has made so many steps."""

        def watch(live):
            if len(live.runs) == runs and len(live.runs[-1].actions) == steps:
                studio.stop()

        monkeypatch.setattr(watched, "then", watch)

    stop_at(1, 3)
    end = make()
    assert (end.doing, end.clips, end.error) == ("stopped", {}, "")
    assert end.runs[0].actions == RUNS["sparse"][:3]
    stop_at(2, 2)  # what is sparse stays
    end = make(seed=5)
    assert [*end.clips] == ["sparse"]
    assert STOPPED in end.notes
    assert "stopped" in end.html()
    stop_at(9, 9)
    first = studio.start({"model": str(flux_folder), "seed": 6, "compare": True})
    after = make()  # a new generation takes the place of the last one
    assert ended(first).doing == "stopped"
    assert np.array_equal(after.made["sparse"].frames, made[0].made["sparse"].frames)
    asked = []

    def stop(pipe, arguments, *, check, **_):
        studio.stop()
        asked.append(True)
        check()

    monkeypatch.setattr(clips, "warm_up", stop)
    assert make(seed=8, steps=5).doing == "stopped"
    assert asked == [True]


@pytest.fixture
def held(studio, flux_folder, watched, monkeypatch):
    """A generation of the first page that goes on at its first step once it is let go."""
    go, begun = threading.Event(), threading.Event()

    def watch(live):
        if live is first and live.runs and len(live.runs[0].actions) == 1:
            begun.set()
            assert go.wait(SECONDS)

    chosen = {"model": str(flux_folder), "prompt": PROMPT, "seed": 11, "compare": False}
    first = None
    monkeypatch.setattr(watched, "then", watch)
    first = studio.start(chosen, "first")
    assert begun.wait(SECONDS)
    yield SimpleNamespace(live=first, chosen=chosen, go=go)
    go.set()
    ended(first)


def test_a_second_page_neither_ends_nor_replaces_the_run_of_the_first(studio, held):
    assert studio.shown("second") is held.live  # a page that is loaded anew
    studio.stop("second")
    second = studio.start({**held.chosen, "seed": 12}, "second")
    assert second.doing == WAITING
    again = studio.start({**held.chosen, "seed": 13}, "second")  # in place of its own
    assert (held.live.stopped, second.stopped, again.stopped) == (False, True, False)
    assert studio.shown("first") is held.live
    assert studio.shown("second") is again
    held.go.set()
    assert [*ended(held.live).clips] == ["sparse"]
    assert ended(second).doing == "stopped"
    assert [*ended(again).clips] == ["sparse"]


@pytest.mark.parametrize("how", ["stop", "start", "stop before it is known"])
def test_what_a_closed_page_began_is_any_page_s_to_stop(studio, held, how):
    if how == "stop before it is known":
        studio.stop("third")
        assert not held.live.stopped
        studio.leave("first")
    else:
        studio.leave("first")
        assert not held.live.stopped
    if how == "stop":
        studio.stop("second")
    elif how == "start":
        ended_soon = studio.start({**held.chosen, "seed": 14}, "second")
        studio.stop("second")
        assert ended_soon.stopped
    assert held.live.stopped
    held.go.set()
    assert ended(held.live).doing == "stopped"


def test_the_view_has_steps_and_numbers_and_no_prompt_can_write_it(made):
    live = made[0]
    sparse, dense = live.made["sparse"], live.made["dense"]
    step, page = sparse.steps[2], PageReader(live.html())
    assert page.problems == []
    times = dense.denoising_seconds / sparse.denoising_seconds
    numbers = {f"{live.quality.psnr_db:.2f} dB", f"{live.quality.ssim:.4f}"}
    assert numbers | {f"{times:.2f}\N{MULTIPLICATION SIGN}"} <= set(page.texts)
    (third,) = (given["title"] for _, given in page.elements if "step 3: s" in str(given))
    assert third.startswith(f"step 3: sparse, {step.attention_kept:.1%} of attention, ")
    letters = [text for text in page.texts if text in ("D", "R", "S")]
    assert letters == [*"DRSS", *"DDDD", *"DRS"]  # both runs, and the legend
    evil = Live("<b>x</b>")
    evil.doing = "<b>y</b>"
    read = PageReader(evil.html())
    assert "".join([*read.headings, *read.texts]).count("<b>") == 2


CHANNELS, GRID = 4, (3, 2, 5)
EXPECTED = torch.randn(*GRID, CHANNELS, generator=torch.Generator().manual_seed(0))
IMAGE = EXPECTED.reshape(1, 6, 5, CHANNELS)[:, :, :4]
PACKED = FluxPipeline._pack_latents(IMAGE.permute(0, 3, 1, 2), 1, CHANNELS, 6, 4)[0]


@pytest.mark.parametrize(
    ("latents", "grid", "expected"),
    [
        (EXPECTED.permute(3, 0, 1, 2), GRID, EXPECTED),
        (EXPECTED.flatten(0, 2), GRID, EXPECTED),
        (PACKED, (1, 3, 2), IMAGE),
        (EXPECTED[0].permute(2, 0, 1), None, EXPECTED[:1]),
        (EXPECTED.flatten(0, 2), None, None),
    ],
    ids=["channels first", "tokens", "packed", "image", "no grid"],
)
def test_latents_are_arranged_where_their_order_is_known(latents, grid, expected):
    arranged = arrange(latents, grid, CHANNELS)
    assert arranged is expected or torch.equal(arranged, expected)


@pytest.mark.parametrize("rising", [False, True])
def test_the_noise_is_taken_off_and_colours_are_those_of_the_vae(rising):
    """Along the straight path of flow matching the guess is exact, whatever the noise.

    A decoder that is a linear map is learnt as it is; before, colours are false.
    """
    config, noise = {"z_dim": CHANNELS}, torch.randn_like(EXPECTED)
    request = SimpleNamespace(model=SimpleNamespace(vae_config=config), planned=None)
    scheduler = FlowMatchEulerDiscreteScheduler(invert_sigmas=rising)
    scheduler.set_timesteps(sigmas=[1.0, 0.8, 0.5, 0.25])
    pipe = SimpleNamespace(scheduler=scheduler)
    preview, matrix = Preview(), np.array([[9, -5, 3], [2, 8, -4], [-6, 1, 7], [0, 3, 2]])
    pixels = np.rint((EXPECTED.numpy() @ matrix + 120).clip(0, 255)).astype(np.uint8)
    for expected_error in (range(2, 256), range(2)):
        for step, after in enumerate([0.8, 0.5, 0.25, 0.0]):
            noisy = ((1 - after) * EXPECTED + after * noise).permute(3, 0, 1, 2)
            batch = torch.stack([noisy, torch.full_like(noisy, torch.nan)])
            pictures = preview.pictures(batch, step, request, pipe)
            assert pictures.shape == pixels.shape
            error = np.abs(pictures.astype(int) - pixels).max()
            assert step == 0 or error in expected_error
        preview.learn(pixels.repeat(4, axis=1).repeat(4, axis=2))
    assert preview.pictures(None, 0, request, pipe) is None
