"""The work behind the page: the same bits as `generate`, stops that hold, refusals."""

import dataclasses
import importlib.util
import json
import socket

import numpy as np
import pytest
import yaml

from chipsparse import load_profile
from chipsparse.cli.media.read import read_clip
from chipsparse.cli.studio import serve, view
from chipsparse.cli.studio.options import HOST, StudioOptions
from chipsparse.cli.studio.run import STOPPED, Feed, Moment, Studio
from chipsparse.experiments import clips
from tests.cli.conftest import command
from tests.tiny_models import PROMPT

SECONDS = 120
ACTIONS = ("dense", "refresh", "sparse", "sparse")


@pytest.fixture(scope="module")
def studio(flux_folder, tmp_path_factory):
    options = StudioOptions(model=str(flux_folder), device="cpu")
    with Studio(options, tmp_path_factory.mktemp("studio")) as studio:
        yield studio


@pytest.fixture(scope="module")
def moments(studio, flux_folder):
    """Starts a generation and gives everything until its end."""

    def start(**fields):
        chosen = {"model": str(flux_folder), "prompt": PROMPT, "seed": 3, "compare": True} | fields
        return follow(studio.start(chosen))

    return start


def follow(events):
    seen = [events.get(timeout=SECONDS)]
    while not seen[-1].ended:
        seen.append(events.get(timeout=SECONDS))
    return seen


@pytest.fixture(scope="module")
def made(moments):
    return moments()


@pytest.fixture
def stop_when(studio, monkeypatch):
    """Presses Stop as soon as a moment is as wished."""
    show = Feed.show

    def arrange(wished):
        def stop(feed, **changes):
            show(feed, **changes)
            if wished(feed.now):
                studio.stop()

        monkeypatch.setattr(Feed, "show", stop)

    return arrange


def test_clips_are_those_of_generate(made, generate, flux_folder, workdir):
    result = made[-1].result
    words = ("--compare", "--seed", "3", "-o", "out.png", "--json", "--device", "cpu")
    outcome = json.loads(generate(*words, model=flux_folder).stdout)
    for way, name in (("sparse", "out.png"), ("dense", "out-dense.png")):
        pixels = read_clip(workdir / name).frames
        assert np.array_equal(getattr(result, way).frames, pixels)
        assert np.array_equal(read_clip(result.clips[way]).frames, pixels)
    assert result.comparison.psnr_db == outcome["comparison"]["psnr_db"]
    assert result.comparison.ssim == outcome["comparison"]["ssim"]
    assert [tuple(run.actions) for run in result.runs] == [ACTIONS, ("dense",) * 4]
    assert {"--compare", "--seed", PROMPT} <= set(result.command)
    # The profile that is saved gives the same clip.
    saved = load_profile(result.profile)
    assert saved.sparsity == load_profile(flux_folder / "chipsparse.yaml").sparsity
    assert yaml.safe_load(result.profile.read_text())["generation"]["height"] == 32
    words = ("--config", str(result.profile), "--seed", "3", "-o", "again.png", "--device", "cpu")
    generate(*words, model=flux_folder)
    assert np.array_equal(read_clip(workdir / "again.png").frames, result.sparse.frames)


def test_every_step_is_shown_with_its_action_and_a_preview(made):
    steps = {}
    for moment in made[:-1]:
        for run in moment.runs:
            steps.setdefault(run.way, []).append(tuple(run.actions))
            assert tuple(run.planned) == (ACTIONS if run.way == "sparse" else ("dense",) * 4)
    for way, actions in (("sparse", ACTIONS), ("dense", ("dense",) * 4)):
        assert list(dict.fromkeys(steps[way])) == [actions[:count] for count in range(5)]
    pictures = [moment.preview for moment in made if moment.preview is not None]
    assert len(pictures) >= 8
    assert {picture.shape for picture in pictures} == {(1, 16, 24, 3)}  # 32x48 pixels, two to one


def test_a_dense_clip_is_made_once(made, moments):
    again = moments()[-1].result
    assert again.kept
    assert again.dense is made[-1].result.dense
    assert [run.way for run in again.runs] == ["sparse"]
    other = moments(seed=4, compare=False)[-1].result
    assert (other.dense, other.comparison, other.kept) == (None, None, False)


def test_stopping_leaves_nothing_behind(made, moments, stop_when, monkeypatch):
    with monkeypatch.context():
        stop_when(lambda now: now.runs and len(now.runs[-1].actions) == 3)
        end = moments()[-1]
        assert (end.stage, end.result, end.error) == ("stopped", None, None)
        assert tuple(end.runs[0].actions) == ACTIONS[:3]
    stop_when(lambda now: False)
    after = moments()[-1].result
    assert np.array_equal(after.sparse.frames, made[-1].result.sparse.frames)


def test_what_is_sparse_stays_where_the_dense_run_is_stopped(moments, stop_when):
    stop_when(lambda now: now.runs and now.runs[-1].way == "dense" and not now.ended)
    result = moments(seed=5)[-1].result
    assert result.dense is None
    assert STOPPED in result.warnings
    assert "stopped" in view.result(result)


def test_a_new_generation_takes_the_place_of_the_last_and_warming_up_stops(
    studio, moments, flux_folder, monkeypatch
):
    first = studio.start({"model": str(flux_folder), "seed": 6, "compare": True})
    assert moments(seed=7)[-1].result is not None
    assert follow(first)[-1].stage == "stopped"
    asked = []

    def stop(pipe, arguments, *, check, **_):
        studio.stop()
        asked.append(True)
        check()

    monkeypatch.setattr(clips, "warm_up", stop)
    assert moments(seed=8, steps=5)[-1].stage == "stopped"
    assert asked == [True]


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"height": 33}, "--height 33 does not fit this model"),
        ({"steps": 0}, "--steps 0 is too small"),
        ({"seed": -1}, "--seed -1 is too small"),
        ({"frames": 5}, "has no num_frames; leave --frames out"),
        ({"model": "/nowhere"}, "the model folder /nowhere does not exist"),
    ],
)
def test_what_does_not_fit_is_one_sentence(moments, fields, sentence):
    end = moments(**fields)[-1]
    assert sentence in end.error
    assert sentence.partition(";")[0] in view.moment(end)


def test_the_result_says_times_and_differences_and_a_prompt_cannot_write_it(made):
    result = made[-1].result
    text, step = view.result(result), result.sparse.steps[2]
    assert f"{result.comparison.psnr_db:.2f} dB" in text
    assert f"{result.comparison.ssim:.4f}" in text
    assert f"{result.comparison.speedup:.2f}" in text
    assert f'title="step 3: sparse, {step.attention_kept:.1%} of attention, ' in text
    assert text.count('class="cs-dense"') == 1 + 4 + 1  # sparse run, dense run, legend
    evil = view.result(dataclasses.replace(result, warnings=["<b>x</b>"]))
    assert "&lt;b&gt;x" in evil
    assert "<b>x" not in evil + view.moment(Moment("<b>x</b>"))


@pytest.fixture
def gradio(monkeypatch):
    """Pretends that Gradio is there, or is not."""
    find_spec = importlib.util.find_spec

    def pretend(there):
        def find(name, *rest):
            return there or None if name == "gradio" else find_spec(name, *rest)

        monkeypatch.setattr("importlib.util.find_spec", find)

    return pretend


def test_what_is_wrong_before_the_page_opens(gradio, tmp_path, monkeypatch):
    gradio(False)
    assert "pip install 'chipsparse[studio]'" in command("studio").sentence()
    gradio(True)
    with socket.socket() as other:
        other.bind((HOST, 0))
        other.listen()
        port = str(other.getsockname()[1])
        assert f"--port {port} is in use" in command("studio", "--port", port).sentence()
    for words, sentence in (
        (("--port", "65536"), "--port 65536 is too large"),
        (("--device", "tpu"), "--device tpu is no device"),
        (("--model", tmp_path), "is not a diffusers model folder"),
    ):
        assert sentence in command("studio", *words).sentence()
    monkeypatch.setattr(serve, "_cached", lambda: ["a/b", "c/d"])
    names = [name for name, _ in serve.models_here("c/d")]
    assert names == ["c/d", "tiny-wan (bundled)", "tiny-flux (bundled)", "a/b"]
