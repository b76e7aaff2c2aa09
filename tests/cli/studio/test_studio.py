"""The work behind the page, without the page: the same bits as `generate`, and stops that hold."""

import json
import queue

import numpy as np
import pytest
import yaml

from chipsparse import load_profile
from chipsparse.cli.commands.studio import StudioOptions
from chipsparse.cli.media.read import read_clip
from chipsparse.cli.studio import view
from chipsparse.cli.studio.choices import Choices
from chipsparse.cli.studio.feed import Feed, Shown
from chipsparse.cli.studio.maker import STOPPED, Result
from chipsparse.cli.studio.studio import BrokenOff, Studio
from chipsparse.experiments import clips as denoise
from tests.tiny_models import PROMPT

SECONDS = 120
ACTIONS = ("dense", "refresh", "sparse", "sparse")


@pytest.fixture(scope="module")
def studio(flux_folder, tmp_path_factory):
    options = StudioOptions(model=str(flux_folder), device="cpu")
    with Studio(options, tmp_path_factory.mktemp("studio")) as studio:
        yield studio


@pytest.fixture
def chosen(flux_folder):
    def choose(**fields):
        return Choices(**{"model": str(flux_folder), "prompt": PROMPT, "seed": 3} | fields)

    return choose


def news(events: queue.SimpleQueue):
    """Everything until the end."""
    found = [events.get(timeout=SECONDS)]
    while isinstance(found[-1], Shown):
        found.append(events.get(timeout=SECONDS))
    return found


@pytest.fixture(scope="module")
def made(studio, flux_folder):
    return news(studio.start(Choices(model=str(flux_folder), prompt=PROMPT, seed=3)))


def test_clips_are_those_of_generate(made, generate, flux_folder, workdir):
    result = made[-1]
    ran = generate(
        *("--compare", "--seed", "3", "-o", "out.png", "--json", "--device", "cpu"),
        model=flux_folder,
    )
    outcome = json.loads(ran.stdout)
    for way, name in (("sparse", "out.png"), ("dense", "out-dense.png")):
        pixels = read_clip(workdir / name).frames
        assert np.array_equal(getattr(result, way).frames, pixels)
        assert np.array_equal(read_clip(result.clips[way]).frames, pixels)
    assert result.comparison.psnr_db == outcome["comparison"]["psnr_db"]
    assert result.comparison.ssim == outcome["comparison"]["ssim"]
    assert [run.actions for run in result.runs] == [ACTIONS, ("dense",) * 4]
    assert {"--compare", "--seed", PROMPT} <= set(result.request["command"])


def test_every_step_is_shown_with_its_action_and_a_preview(made):
    moments = made[:-1]
    steps = {}
    for moment in moments:
        for run in moment.runs:
            steps.setdefault(run.way, []).append(run.actions)
            assert run.planned == (ACTIONS if run.way == "sparse" else ("dense",) * 4)
    for way, actions in (("sparse", ACTIONS), ("dense", ("dense",) * 4)):
        assert list(dict.fromkeys(steps[way])) == [actions[:count] for count in range(5)]
    pictures = [moment.preview for moment in moments if moment.preview is not None]
    assert len(pictures) >= 8
    assert {picture.shape for picture in pictures} == {(1, 16, 24, 3)}  # 32x48 pixels, two to one
    assert [moment.stage for moment in moments][-1] == "comparing and writing"


def test_the_profile_that_is_saved_gives_the_same_clip(made, generate, flux_folder, workdir):
    result = made[-1]
    saved = load_profile(result.profile)
    assert saved.sparsity == load_profile(flux_folder / "chipsparse.yaml").sparsity
    assert yaml.safe_load(result.profile.read_text())["generation"]["height"] == 32
    generate(
        *("--config", str(result.profile), "--seed", "3", "-o", "out.png", "--device", "cpu"),
        model=flux_folder,
    )
    assert np.array_equal(read_clip(workdir / "out.png").frames, result.sparse.frames)


def test_a_dense_clip_is_made_once(made, studio, chosen):
    again = news(studio.start(chosen()))[-1]
    assert again.kept
    assert again.dense is made[-1].dense
    assert [run.way for run in again.runs] == ["sparse"]
    other = news(studio.start(chosen(seed=4, compare=False)))[-1]
    assert (other.dense, other.comparison, other.kept) == (None, None, False)


def test_stopping_leaves_nothing_behind(made, studio, chosen, monkeypatch):
    shown = Feed.step_done

    def stop_at_the_third(feed, *arguments):
        if len(feed.now.runs[-1].actions) == 2:
            studio.stop()
        shown(feed, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Feed, "step_done", stop_at_the_third)
        end = news(studio.start(chosen()))[-1]
    assert isinstance(end, BrokenOff)
    assert end.why is None
    assert end.last.runs[0].actions == ACTIONS[:3]
    after = news(studio.start(chosen()))[-1]
    assert np.array_equal(after.sparse.frames, made[-1].sparse.frames)


def test_what_is_sparse_stays_where_the_dense_run_is_stopped(studio, chosen, monkeypatch):
    shown = Feed.step_done

    def stop_when_dense(feed, *arguments):
        if feed.now.runs[-1].way == "dense":
            studio.stop()
        shown(feed, *arguments)

    monkeypatch.setattr(Feed, "step_done", stop_when_dense)
    end = news(studio.start(chosen(seed=5)))[-1]
    assert isinstance(end, Result)
    assert end.dense is None
    assert STOPPED in end.request["warnings"]
    assert "stopped" in view.result(end)


def test_a_new_generation_takes_the_place_of_the_last(studio, chosen):
    first, second = studio.start(chosen(seed=6)), studio.start(chosen(seed=7))
    assert isinstance(news(first)[-1], BrokenOff)
    assert news(second)[-1].request["seed"] == 7


def test_warming_up_can_be_stopped(studio, chosen, monkeypatch):
    asked = []

    def stop(pipe, arguments, *, check, **_):
        studio.stop()
        asked.append(True)
        check()

    monkeypatch.setattr(denoise, "warm_up", stop)
    end = news(studio.start(chosen(seed=8, steps=5)))[-1]
    assert asked == [True]
    assert isinstance(end, BrokenOff)
    assert end.why is None


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"height": 33}, "--height 33 does not fit this model"),
        ({"steps": 0}, "--steps 0 is too small"),
        ({"seed": -1}, "--seed -1 is out of range"),
        ({"frames": 5}, "has no num_frames; leave --frames out"),
        ({"model": "/nowhere"}, "the model folder /nowhere does not exist"),
    ],
)
def test_what_does_not_fit_is_one_sentence(studio, chosen, fields, sentence):
    end = news(studio.start(chosen(**fields)))[-1]
    assert sentence in end.why
    assert sentence.partition(";")[0] in view.moment(end.last, error=end.why)


def test_a_prompt_cannot_write_the_page(made):
    """What others may have written is escaped."""
    import dataclasses

    result = made[-1]
    evil = dataclasses.replace(result, request={**result.request, "warnings": ["<b>x</b>"]})
    assert "&lt;b&gt;x" in view.result(evil)
    assert "<b>x" not in view.result(evil)
    assert "<b>x" not in view.moment(Shown("<b>x</b>"))


def test_the_result_says_times_and_differences(made):
    result, text = made[-1], view.result(made[-1])
    assert f"{result.comparison.psnr_db:.2f} dB" in text
    assert f"{result.comparison.ssim:.4f}" in text
    assert f"{result.comparison.speedup:.2f}" in text
    first = result.sparse.steps[2]
    assert f'title="step 3: sparse, {first.attention_kept:.1%} of attention, ' in text
    assert text.count('class="cs-dense"') == 1 + 4 + 1  # sparse run, dense run, legend
