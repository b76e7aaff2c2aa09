"""The work behind the page: the same bits as `generate`, previews, stops that hold, refusals."""

import json
import re
import threading
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from PIL import Image
from safetensors.torch import save_file

import chipsparse.cli.studio
from chipsparse import bundled_model, load_profile
from chipsparse.cli.media.read import read_clip
from chipsparse.cli.options import GenerationOptions
from chipsparse.cli.progress import silent_display
from chipsparse.cli.request import place_on, resolve
from chipsparse.cli.studio import no_faster, run
from chipsparse.cli.studio.labels import as_options, with_labels
from chipsparse.cli.studio.options import StudioOptions
from chipsparse.cli.studio.preview import Preview, arrange
from chipsparse.cli.studio.run import KEPT, STOPPED, WAITING, Live, Studio, file_name
from chipsparse.experiments import clips
from chipsparse.experiments.records import StepResult
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
        show = Live.show
        watch = SimpleNamespace(then=lambda live: None)

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
    go = threading.Event()
    begun = threading.Event()

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
    sparse = live.made["sparse"]
    dense = live.made["dense"]
    step = sparse.steps[2]
    page = PageReader(live.result_html())
    assert page.problems == []
    times = dense.denoising_seconds / sparse.denoising_seconds
    numbers = {f"{live.quality.psnr_db:.2f} dB", f"{live.quality.ssim:.4f}"}
    assert numbers | {f"{times:.2f}\N{MULTIPLICATION SIGN}"} <= set(page.texts)
    (third,) = (given["title"] for _, given in page.elements if "step 3: s" in str(given))
    assert third.startswith(f"step 3: sparse, {step.attention_kept:.1%} of attention, ")
    assert page.headings[0] == PROMPT
    settings = "seed 3, 48x32 pixels, 4 steps, guidance 3, "
    assert any(text.startswith(settings) for text in page.texts)
    letters = [text for text in page.texts if text in ("D", "R", "S")]
    assert letters == [*"DRSS", *"DDDD", *"DRS"]  # both runs, and the legend
    evil = Live("<b>x</b>")
    evil.doing = "<b>y</b>"
    read = PageReader(evil.html())
    assert "".join([*read.headings, *read.texts]).count("<b>") == 2


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"height": "33"}, "Height: 33 does not fit this model, which needs a multiple of 16; "),
        ({"seed": "-1"}, "Seed: -1 must be greater than or equal to 0"),
        ({"seed": "1.5"}, "Seed: 1.5 must be a valid integer"),
        ({"steps": "many"}, "Steps: many must be a valid integer"),
        ({"frames": "5"}, "FluxPipeline has no num_frames; leave Frames out"),
        ({"lora": "a.safetensors"}, "LoRA: a.safetensors does not exist"),
        ({"scheduler": "UniPC"}, "Scheduler: UniPC is none of diffusers' schedulers"),
        ({"strength": "0.5"}, "Strength: needs an Image"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_refusal_names_the_field(make, fields, sentence):
    end = make(**fields)
    assert end.error.startswith(sentence)
    assert (end.clips, "Traceback" in end.error) == ({}, False)
    assert end.error in PageReader(end.html()).texts


def test_a_field_with_spaces_alone_is_empty():
    held = {"height": " ", "prompt": " a ball ", "seed": 0, "image": None}
    assert as_options(held) == {"prompt": "a ball", "seed": 0}


@pytest.mark.parametrize(
    ("option", "field"),
    [
        ("--flow-shift 3: no", "Flow shift: 3: no"),
        ("--quality: no such", "Quality: no such"),
        ("fewer --frames or --steps", "fewer Frames or Steps"),
        ("--negative-prompt is text", "Negative prompt: is text"),
        ("use --dtype bfloat16 and --config", "use --dtype bfloat16 and --config"),
    ],
)
def test_options_become_labels(option, field):
    assert with_labels(option) == field


def test_a_page_that_is_loaded_anew_has_the_latest_result_and_no_error(studio, made, make):
    assert make(seed="-1").error
    shown = studio.shown("new")
    assert shown.clips
    assert shown is [*studio.results.values()][-1]
    assert studio.shown("").error  # the page's own


def test_what_an_empty_field_takes(studio, flux_folder):
    def steps(studio, **fields):
        return studio.resolve({"model": str(flux_folder), **fields}).settings.num_inference_steps

    assert steps(studio, steps="", seed="") == 4  # the model's
    assert steps(studio, steps="7") == 7
    options = StudioOptions(model=str(flux_folder), device="cpu", steps=5, seed=9)
    with closing(Studio(options, studio._folder)) as typed:
        assert steps(typed, steps="") == 5
        assert typed.resolve({"model": str(flux_folder)}).generate_options.seed == 9
        other = typed.resolve({"model": str(bundled_model("tiny-flux"))})
        assert other.settings.num_inference_steps == 50


def test_results_are_listed_and_named_by_what_was_asked(studio, made, make):
    live = made[0]
    stem = PROMPT.replace(" ", "-")
    names = {way: file.name for way, file in live.clips.items()}
    assert names == {"sparse": f"{stem}-3-profile.png", "dense": f"{stem}-3-dense.png"}
    live = make(seed=5, compare=False)
    page = PageReader(studio.results_html())
    numbers = [given["data-number"] for _, given in page.elements if "data-number" in given]
    assert numbers == [str(number) for number in reversed(studio.results)]
    assert numbers[0] == str(live.number)
    assert page.problems == []
    details = [text for text in page.texts if text.startswith("seed ")]
    psnr = made[0].quality.psnr_db
    speedup = f"{made[0].speedup:.2f}\N{MULTIPLICATION SIGN} as fast"
    assert details[0] == "seed 5"
    assert details[-made[0].number] == f"seed 3, {speedup}, PSNR {psnr:.2f} dB"


def test_names_of_files():
    assert file_name("A cat, in the RAIN!", 7) == "a-cat-in-the-rain-7"
    assert file_name("../\N{CJK UNIFIED IDEOGRAPH-732B}", 0) == "clip-0"
    assert file_name("word " * 40, 1) == "-".join(["word"] * 12) + "-1"


def test_the_oldest_results_go_with_their_files(make, studio, monkeypatch):
    first = make(seed=20, compare=False)
    monkeypatch.setattr(run, "MOST_RESULTS", len(studio.results))
    oldest = next(iter(studio.results.values()))
    last = make(seed=21, compare=False)
    assert oldest.number not in studio.results
    assert not oldest.profile.parent.exists()
    assert first.clips["sparse"].exists()
    assert last.number in studio.results


def test_the_time_is_that_of_the_same_work_before(make, studio, flux_folder):
    fields = {"model": str(flux_folder), "prompt": "x", "seed": 40, "compare": True, "steps": "3"}
    assert studio.estimate(fields) == ""
    seconds = make(**fields).seconds
    assert seconds > 0
    text = f"About {run.duration(seconds)}, as before."
    assert studio.estimate({**fields, "prompt": "another", "seed": "41"}) == text
    assert studio.estimate({**fields, "steps": "5"}) == ""
    assert make(**fields).seconds is None  # the dense one was there


def test_an_image_to_start_from(made, make, tmp_path):
    file = tmp_path / "red.png"
    Image.new("RGB", (96, 64), "red").save(file)
    live = make(image=str(file), strength="0.5")
    assert len(live.runs[0].actions) == len(live.runs[0].planned) == 2
    assert [item.way for item in live.runs] == ["sparse", "dense"]  # no dense clip of before
    assert {"from red.png", "strength 0.5"} <= set(live.facts)
    assert live.command[live.command.index("--image") + 1] == "red.png"
    assert not np.array_equal(live.made["dense"].frames, made[0].made["dense"].frames)


def test_a_model_that_starts_from_an_image_is_opened_without_one(
    make,
    studio,
    image_to_video_folder,
):
    model = {"model": str(image_to_video_folder)}
    request = studio.resolve(model, complete=False)
    assert request.model.from_image() is request.model
    end = make(**model)
    name = request.model.pipeline_class.__name__
    assert end.error == f"{name} starts from an image; give one with Image"


def test_schedulers_and_loras_load_the_pipeline_anew(made, make, flux_folder, tmp_path):
    before = made[0].made["sparse"].frames
    shifted = make(flow_shift="7", compare=False)
    assert "flow shift 7" in ", ".join(shifted.facts)
    assert not np.array_equal(shifted.made["sparse"].frames, before)
    transformer = FluxTransformer2DModel.from_pretrained(flux_folder, subfolder="transformer")
    width = transformer.inner_dim
    tensors = {}
    for name, shape in (("A", (2, width)), ("B", (width, 2))):
        key = f"transformer.transformer_blocks.0.attn.to_q.lora_{name}.weight"
        tensors[key] = torch.full(shape, 0.5)
    save_file(tensors, tmp_path / "style.safetensors")
    styled = make(lora=str(tmp_path), lora_scale="0.5", compare=False)
    assert styled.error == ""
    assert "LoRA style.safetensors at 0.5" in styled.facts
    assert not np.array_equal(styled.made["sparse"].frames, before)
    assert np.array_equal(make(compare=False).made["sparse"].frames, before)


def steps_of(**seconds):
    return [StepResult(step=0, action=name, seconds=value) for name, value in seconds.items()]


def test_the_reasons_why_it_is_no_faster(monkeypatch):
    def reasons(seconds, *, nothing=None, device="cpu", busy=None):
        request = SimpleNamespace(
            device=torch.device(device),
            dtype=torch.float32,
            too_few_steps=None,
        )
        dense = SimpleNamespace(denoising_seconds=2.0, steps=steps_of(dense=1.0))
        steps = steps_of(dense=1.0, refresh=1.5, sparse=seconds)
        sparse = SimpleNamespace(denoising_seconds=seconds, steps=steps, nothing_sparse=nothing)
        return no_faster.why_no_faster(request, dense, sparse, busy)

    assert reasons(1.8) == []
    measured = (
        "A dense step takes 1.00 s. Of 3 steps: 1 in full in 1.00 s, 1 in full with a refresh in "
        "1.50 s, 1 sparse in 4.00 s each."
    )
    other_work = "The CPU had other work: a load."
    assert reasons(4.0, busy="a load") == [measured, no_faster.REFERENCES, other_work]
    assert reasons(4.0, nothing="nothing runs sparse: x") == [measured, "Nothing runs sparse: x."]
    assert reasons(4.0, device="cuda") == [measured]
    monkeypatch.setattr(no_faster, "too_small", lambda _: "a layer this small is quick")
    assert reasons(4.0, device="cuda") == [measured, "A layer this small is quick."]


def test_a_model_can_be_too_small_for_a_gpu():
    options = GenerationOptions(model=str(bundled_model("tiny-wan")), dtype="bfloat16")
    request = resolve(
        options,
        place_on(torch.device("cuda"), options, silent_display(), here=False),
    )
    assert no_faster.too_small(request).startswith(
        "a layer this small computes in less time than the host takes to launch a sparse one",
    )


def test_the_view_says_why_it_is_no_faster(made):
    live = Live()
    for reasons in ([], ["A sparse step is dear."]):
        live.__dict__ |= made[0].__dict__ | {"no_faster": reasons}
        texts = PageReader(live.result_html()).texts
        assert ("Why it is no faster" in texts) == bool(reasons)
        assert set(reasons) <= set(texts)


def luminance(colour):
    channels = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one, other):
    darker, lighter = sorted([luminance(one), luminance(other)])
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("scheme", [".gradio-container", ".dark .gradio-container"])
def test_texts_stand_out_in_both_schemes(scheme):
    assert contrast("#ffffff", "#767676") == pytest.approx(4.54, abs=0.01)
    style = (Path(chipsparse.cli.studio.__path__[0]) / "studio.css").read_text()
    block = re.search(rf"^{re.escape(scheme)}[^{{]*{{([^}}]*)}}", style, re.M)[1]
    colours = dict(re.findall(r"--cs-([a-z-]+): (#[0-9a-f]{6})", block))
    pairs = [
        ("soft", "paper"),
        ("soft", "card"),
        ("link", "paper"),
        ("alert-ink", "alert"),
        ("on-sparse", "sparse"),
    ]
    for text, ground in pairs:
        assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)
    for name in ("block-info-text-color", "input-placeholder-color"):
        assert f"--{name}: var(--cs-soft)" in style


CHANNELS = 4
GRID = (3, 2, 5)
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
    config = {"z_dim": CHANNELS}
    noise = torch.randn_like(EXPECTED)
    request = SimpleNamespace(model=SimpleNamespace(vae_config=config), planned=None)
    scheduler = FlowMatchEulerDiscreteScheduler(invert_sigmas=rising)
    scheduler.set_timesteps(sigmas=[1.0, 0.8, 0.5, 0.25])
    pipe = SimpleNamespace(scheduler=scheduler)
    preview = Preview()
    matrix = np.array([[9, -5, 3], [2, 8, -4], [-6, 1, 7], [0, 3, 2]])
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
