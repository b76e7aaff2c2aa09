"""`chipsparse report`: the page of every kind of file, and what it refuses."""

import base64
import copy
import functools
import importlib.util
import io
import json
import os
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
from markupsafe import Markup
from PIL import Image

import chipsparse
from chipsparse.cli.errors import UserError
from chipsparse.cli.generate import job
from chipsparse.cli.media import report_file
from chipsparse.cli.pages import part
from chipsparse.cli.pages.charts import Drawn, Renderer
from chipsparse.cli.pages.comparison_record import ConfigsComparison
from chipsparse.cli.pages.generation_charts import HELD
from chipsparse.cli.views.names import command_text, name_of
from chipsparse.cli.pages.page import page
from chipsparse.cli.pages.records import read_record
from chipsparse.cli.pages.samples import FRAMES, LARGEST_SIDE, SAME_RUN_SECONDS
from tests.cli.conftest import PROFILE, command, names, nothing_written
from tests.cli.html_reader import PageReader
from tests.cli.test_tune import PROFILE as FLUX_PROFILE
from tests.cli.test_tune import PROMPTS
from tests.tiny_models import PROMPT, tiny_flux_pipeline, tiny_wan_pipeline

HOSTILE = "<script>alert(\"1\")</script> & 'x' </h1><img src=http://example.org/a.png>"
HOSTED = PROFILE + "  memory: {offload: always}\n"
FRAME = (32, 48, 3)
LAYERS, STEPS, PARTS = 3, 4, 2
OLDER_LACKS = "generation", *HELD


def as_made(*arguments):
    return command(*arguments).fine().stdout


@pytest.fixture(scope="module")
def made(model_folder, tmp_path_factory):
    """A folder with what the other commands write, made once."""
    folder = tmp_path_factory.mktemp("made")
    before = Path.cwd()
    os.chdir(folder)
    try:
        Path("hosted.yaml").write_text(HOSTED)
        Path("prompts.txt").write_text(f"{PROMPT}\n{HOSTILE}\na third one\n")
        Path("flux.txt").write_text("\n".join(PROMPTS))
        tiny_flux_pipeline().save_pretrained("flux")
        Path("flux/chipsparse.yaml").write_text(FLUX_PROFILE)
        wan = ("--model", model_folder)
        config = ("--config", "hosted.yaml")
        as_made("generate", PROMPT, *wan, *config, "-o", "o.gif", "--compare", "--report", "r.json")
        as_made("generate", HOSTILE, *wan, "-o", "h.png", "--frames", 1, "--report", "hostile.json")
        Path("configs.json").write_text(
            as_made(
                *("compare", "dense", "profile", *wan, "--prompts", "prompts.txt"),
                *("--count", 2, "-o", "worst.gif", "--json"),
            )
        )
        Path("files.json").write_text(as_made("compare", "o-dense.gif", "o.gif", "--json"))
        Path("bench.json").write_text(as_made("bench", *wan, "--json"))
        as_made(
            *("tune", "--model", "flux", "--prompts", "flux.txt", "--min-psnr", 25, "-o", "p.yaml"),
            *("--calibration-prompts", 1, "--held-out-prompts", 2),
        )
    finally:
        os.chdir(before)
    return folder


@pytest.fixture
def folder(made, workdir):
    """A copy of these files as the current folder, with their times."""
    shutil.copytree(made, workdir, dirs_exist_ok=True)
    return workdir


def made_page(*arguments):
    assert command("report", *arguments).fine().stdout.startswith("page.html (")
    page = PageReader(Path("page.html").read_text(encoding="utf-8"))
    assert page.problems == []
    return page


@pytest.fixture(scope="module")
def page_of(made, tmp_path_factory):
    """The whole page of a file as it was made, read once."""

    @functools.cache
    def make(name):
        with pytest.MonkeyPatch.context() as here:
            here.chdir(tmp_path_factory.mktemp("page"))
            here.setenv("HOME", str(made))
            return made_page(made / name, "-o", "page.html")

    return make


@pytest.fixture(scope="module")
def read(made):
    """What a file says as it was made."""
    return lambda name: json.loads((made / name).read_text())


@pytest.fixture
def draws(monkeypatch):
    """Parts of the captions of charts that are drawn; the others, which take long, are not."""
    draw, wanted = Renderer.__call__, set()

    def drawn(renderer, chart):
        is_wanted = any(caption in chart.caption for caption in wanted)
        return draw(renderer, chart) if is_wanted else Drawn([], Markup(), Markup())

    monkeypatch.setattr(Renderer, "__call__", drawn)
    return wanted


@pytest.fixture
def report(folder, draws):
    """Makes a page with the charts of these captions and reads it."""

    def make(*arguments, drawn=()):
        draws.update(drawn)
        return made_page(*arguments, "-o", "page.html")

    return make


@pytest.fixture
def refused(folder):
    """Returns the one sentence of a page that cannot be made, before which nothing was written."""

    def make(*arguments):
        with nothing_written(folder):
            ran = command("report", *arguments)
        assert len(ran.stderr.splitlines()) == 1
        return ran.sentence()

    return make


def changed(name, change, to="changed.json"):
    """A copy of a file with a change; its pictures are still those of the first one."""
    content = json.loads(Path(name).read_text())
    change(content)
    Path(to).write_text(json.dumps(content))
    return to


KINDS = ("r.json", "hostile.json", "configs.json", "files.json", "bench.json", "p.tune.json")


# Every page.


@pytest.mark.parametrize("name", KINDS)
def test_a_page_needs_nothing_else(page_of, made, name):
    page = page_of(name)
    assert page.external() == []
    (policy,) = page.all("meta", **{"http-equiv": "Content-Security-Policy"})
    assert policy["content"].startswith("default-src 'none'; img-src data:;")
    assert "prefers-color-scheme: dark" in page.style
    assert f"chipsparse {chipsparse.__version__}" in page.text
    assert "None" not in page.text
    assert "nan" not in page.text.split()
    ids = [found["id"] for _, found in page.elements if "id" in found]
    assert len(ids) == len(set(ids))
    assert str(made.parent) not in page.source
    assert "/tmp" not in page.source


@pytest.mark.parametrize("name", KINDS)
def test_every_chart_says_what_it_shows(page_of, name):
    page = page_of(name)
    wide, narrow = (page.all("div", **{"class": width}) for width in ("wide", "narrow"))
    assert [each["aria-label"] for each in wide] == [each["aria-label"] for each in narrow]
    assert all(each["role"] == "img" and each["aria-label"] for each in wide)
    assert len(page.all("svg")) == 2 * len(wide)
    assert bool(wide) == (name != "bench.json")
    for each in page.all("path"):
        assert set(each["d"]) <= set("MLCQz 0123456789.-")  # no NaN, no infinity
    # All colours are those of the style sheet, for a dark screen, too.
    assert not [style for each in page.elements if "#" in (style := each[1].get("style") or "")]


def test_texts_of_the_files_are_shown_as_texts(page_of):
    page = page_of("hostile.json")
    assert page.headings[0] == HOSTILE
    assert page.all("script") == []
    assert not [each for each in page.all("img") if each["src"].startswith("http")]
    assert HOSTILE in page_of("configs.json").texts


def test_what_html_cannot_write_is_replaced(report):
    def spoil(content):
        content["request"]["prompt"] = "a\x00b\ud800c\x1bd"

    assert report(changed("r.json", spoil)).headings[0] == "a\ufffdb\ufffdc\ufffdd"


# A generation.


def test_the_numbers_of_a_generation(page_of, read):
    data, page = read("r.json"), page_of("r.json")
    assert page.headings[0] == PROMPT
    found = data["comparison"]
    assert f"{found['speedup']:.2f}\N{MULTIPLICATION SIGN}" in page.texts
    assert f"{found['psnr_db']:.2f} dB" in page.texts
    assert f"SSIM {found['ssim']:.4f}" in page.texts
    assert "1 dense, 1 refresh, 2 sparse" in page.texts
    assert "48\N{MULTIPLICATION SIGN}32 pixels, 5 frames" in page.texts
    assert data["versions"]["torch"] in page.text
    assert list(page.sections) == [
        "",
        PROMPT,
        "Sample frames",
        "Steps",
        "Budget of each layer and step",
        "Memory over steps",
        "What ran where",
        "Run it again",
    ]
    assert page.all("p", **{"class": "alert"}) == []
    assert "guidance\nscale 3\n" in page.sections[PROMPT]
    assert "not shown" not in page.texts


def test_a_generation_that_starts_from_a_picture(report):
    """diffusers leaves the first steps of the schedule out; the others are all that were asked."""

    def from_image(content):
        content["steps"] = [each for each in content["steps"] if each["step"] >= 1]
        content["dtype"] = None  # as where nothing ran sparse
        content["request"]["negative_prompt"] = "blurred <b>"
        content["request"]["settings"] |= {"guidance_scale": 3.5, "true_cfg_scale": 4.0}
        content["request"] |= {
            **{"image": "alice/start.png", "strength": 0.75},
            **{"scheduler": "UniPCMultistepScheduler", "flow_shift": 5.0},
            **{"loras": [{"file": "alice/style.safetensors", "scale": 0.8}]},
        }
        content["denoising_seconds"]["dense"] = 6.0

    page = report(changed("r.json", from_image), drawn=["Time of each step"])
    assert page.all("p", **{"class": "alert"}) == []
    for shown in (
        "3\nsteps\n",
        "starts from\nstart.png, strength 0.75\n",
        "scheduler\nUniPCMultistepScheduler\n",
        "flow shift\n5\n",
        "LoRA\nstyle.safetensors at 0.8\n",
        "not shown\nblurred <b>\n",
        "guidance\nscale 3.5, classifier-free 4\n",
        "cpu, float32\n",
    ):
        assert shown in page.sections[PROMPT]
    assert "mean step of the dense run, 2.00 s" in page.text


def test_warnings_stand_on_the_page_once(report):
    few = "nothing runs sparse: the profile's schedule computes all 4 steps in full"

    def warned(content):
        content["request"]["warnings"] = [few, "the prompt is empty"]
        content["nothing_sparse"] = "nothing runs sparse: 4 steps are too few"

    page = report(changed("r.json", warned))
    assert [text for text in page.texts if text.startswith("Warning: ")] == [
        f"Warning: {few}",
        "Warning: the prompt is empty",
    ]

    def from_python(content):
        warned(content)
        del content["request"]

    page = report(changed("r.json", from_python))
    assert "Warning: nothing runs sparse: 4 steps are too few" in page.texts


def test_what_follows_an_option_is_no_hub_name_but_a_model():
    words = ["generate", "a/b", "--model", "me/wan", "-o", "--output", "me/o.gif"]
    text = command_text([*words, "--negative-prompt", "x/y", "--", "-a/b"])
    assert text == "generate a/b --model me/wan -o --output o.gif --negative-prompt x/y -- -a/b"


def test_the_command_makes_the_same_again(page_of, read, folder, model_folder):
    data = read("r.json")
    words = data["request"]["command"]
    named = shlex.join("tiny" if word == str(model_folder) else word for word in words)
    assert f"\n{named}\n" in page_of("r.json").sections["Run it again"]
    again = [*words, "--output", "again.gif", "--report", "again.json"]
    as_made(*again[1:])
    made = json.loads(Path("again.json").read_text())["request"]
    assert made.pop("command") != words
    del data["request"]["command"]
    assert made == data["request"]
    assert Path("again.gif").read_bytes() == Path("o.gif").read_bytes()


def test_a_page_names_no_folder(report, folder, monkeypatch):
    """Whatever a file says: a page that is sent must not say who made it."""
    monkeypatch.setenv("HOME", "/data/Al Ice")
    secrets = ("alice", "Alice", "Al Ice", "secret", str(folder), str(folder.parent))

    def private(content):
        content["pipeline"]["location"] = "/home/alice/secret/my-wan"
        content["request"]["profile"] = "/srv/secret/fast.yaml"
        content["request"]["command"][3:] = [
            *("--model", "../secret/my-wan", "--config", "C:\\Users\\Alice\\fast.yaml"),
            *("--output", "/data/Al Ice/out put.gif", "--negative-prompt", "a 24/7/365 sign"),
        ]
        content["fallbacks"] = ["no cache in /home/alice: see ~/secret/log.txt, (/root/x/y.json)"]
        content["notes"] = ["it is in /data/Al Ice/z.txt", "8/16 and and/or stay, 1:2 /s"]
        content["error"] = "OSError: '/Users/alice/secret/w.bin' is gone"
        content["files"] = {"output": "/home/alice/secret/o.gif"}

    page = report(changed("r.json", private), "--media", str(folder / "o.gif"))
    assert [word for word in secrets if word in page.source] == []
    assert "my-wan\n" in page.sections[PROMPT]
    assert "fast.yaml\n" in page.sections[PROMPT]
    assert (
        "--model my-wan --config fast.yaml --output 'out put.gif' "
        "--negative-prompt 'a 24/7/365 sign'\n"
    ) in page.sections["Run it again"]
    ran = page.sections["What ran where"]
    assert "no cache in ~: see log.txt, (y.json)\n" in ran
    assert "it is in z.txt\n8/16 and and/or stay, 1:2 /s\n" in ran
    assert "OSError: 'w.bin' is gone" in page.text


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/home/alice/models/my-wan/", "my-wan"),
        ("C:\\Users\\Alice\\my wan", "my wan"),
        ("~/m", "m"),
        ("../m", "m"),
        ("a/b/c", "c"),
        ("Wan-AI/Wan2.1-T2V-1.3B-Diffusers", "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"),
        (
            "/home/alice/.cache/huggingface/hub/models--Wan-AI--Wan2.1/snapshots/0fad",
            "Wan-AI/Wan2.1",
        ),
        ("profile", "profile"),
        ("", ""),
        ("/", "/"),
    ],
)
def test_names_of_paths(path, name):
    assert name_of(path) == name


def test_the_steps_of_a_generation(page_of, read):
    data, steps = read("r.json"), page_of("r.json").sections["Steps"]
    for number, action in enumerate(("dense", "refresh", "sparse", "sparse")):
        calls = [step for step in data["steps"] if step["step"] == number]
        seconds = sum(step["seconds"] for step in calls)
        shown = f"{seconds:.2f} s" if seconds >= 0.1 else f"{1e3 * seconds:.1f} ms"
        assert f"step {number}, {action}: {shown}" in steps
    mean = data["denoising_seconds"]["dense"] / STEPS
    shown = f"{mean:.2f} s" if mean >= 0.1 else f"{1e3 * mean:.1f} ms"
    assert f"mean step of the dense run, {shown}" in steps


def test_the_budgets_cover_every_layer_and_step(page_of, read):
    budgets = page_of("r.json").sections["Budget of each layer and step"]
    sparse = read("r.json")["steps"][4]["layers"]
    wide_and_narrow = 2
    for text in ("step 0: dense", "step 1: refresh"):
        assert budgets.count(f"layers 0 to {LAYERS - 1}, {text}\n") == PARTS * wide_and_narrow
    shares = {entry["part"]: entry["kept"] for entry in sparse if entry["layer"] == 2}
    for share in shares.values():
        assert f"steps 2 to 3: sparse, {share:.1%} computed" in budgets


def test_a_forecast_is_shown_apart_from_a_held_output(report):
    def skip(content):
        for step in content["steps"]:
            if step["step"] >= 2:
                step |= {"action": "skip", "forecast": step["step"] == 3, "layers": []}

    page = report(changed("hostile.json", skip), drawn=["Time of each step"])
    steps = page.sections["Steps"].split()
    assert steps.count("forecast") == 1
    assert " 3 skipped, forecast" in " ".join(steps)
    assert " 2 skip" in " ".join(steps)


def test_the_memory_of_a_generation(page_of):
    memory = page_of("r.json").sections["Memory over steps"]
    assert "caches in host memory" in memory
    assert "to the device" in memory
    assert "allocated on the GPU behind" not in memory
    memory = page_of("hostile.json").sections["Memory over steps"]
    assert "host memory" not in memory.split("\n", 1)[1]


def test_the_memory_of_a_gpu(report):
    def on_a_gpu(content):
        for step in content["steps"]:
            step["allocated_bytes"] = 3 << 30
            step["peak_allocated_bytes"] = 5 << 30

    page = report(changed("r.json", on_a_gpu), drawn=["Memory held behind each step"])
    memory = page.sections["Memory over steps"]
    assert "memory, GiB" in memory
    assert "allocated on the GPU behind the step" in memory
    assert "most allocated on the GPU until then" in memory


def test_what_is_not_in_a_report_is_said_with_the_way_to_get_it(page_of):
    page = page_of("hostile.json")
    missing = page.sections["Not on this page"]
    assert "Quality and speed: \nThey are there with generate --compare" in missing


def test_fallbacks_notes_and_backends(report, page_of):
    def add(content):
        content["fallbacks"] = ["MLP runs dense in <3> layers"]
        content["notes"] = ["a note"]

    shown = report(changed("r.json", add))
    ran = shown.sections["What ran where"]
    assert "MLP runs dense in <3> layers\n" in ran
    assert "a note\n" in ran
    assert "column_selection\nreference\n" in ran
    assert "triton: CPU tensors need" in ran
    assert "Nothing ran dense" not in ran
    assert "Nothing ran dense" in page_of("r.json").sections["What ran where"]


def test_a_generation_that_failed(report, monkeypatch, model_folder):
    def fail(*_, **__):
        raise ZeroDivisionError("in the <decoder>")

    monkeypatch.setattr(job.media, "write_media", fail)
    given = ("generate", PROMPT, "--model", model_folder, "-o", "f.gif", "--strict")
    assert command(*given, "--ram", "1K", "--report", "failed.json").exit_code == 2
    page = report("failed.json")
    (alert,) = (text for text in page.texts if text.startswith("This generation failed"))
    assert "FallbackError" in alert or "BudgetError" in alert
    assert "Steps" not in page.headings


def test_a_generation_that_broke_off(report):
    def break_off(content):
        content["steps"] = content["steps"][:5]
        content["steps"][-1] |= {"finished": False, "seconds": None}
        content["error"] = "OutOfMemoryError: <too> large"
        for name in ("files", "comparison", "denoising_seconds"):
            del content[name]

    page = report(changed("r.json", break_off), drawn=["Time of each step", "Computed "])
    assert "This generation failed after 2 of 4 steps: OutOfMemoryError: <too> large" in page.texts
    assert "2 of 4" in page.texts
    assert "step 1, refresh" in page.sections["Steps"]
    assert "sparse, broke off" in page.sections["Steps"]
    assert "layers 0 to 2, step 1: refresh" in page.sections["Budget of each layer and step"]


def test_a_generation_that_was_interrupted(report):
    def interrupt(content):
        content["steps"] = content["steps"][:4]

    page = report(changed("r.json", interrupt))
    assert "This generation was not finished: 2 of 4 steps were." in page.texts


def test_the_sections_of_a_call(report):
    """Steps of a second section have numbers from 0, too, and stand behind those of the first."""

    def continued(content):
        again = [step | {"generation": step["generation"] + 1} for step in content["steps"]]
        content["steps"] += again[:-2]  # one step less

    captions = ["Time of each step", "Computed ", "Share"]
    page = report(changed("r.json", continued), drawn=captions)
    assert "This generation was not finished: 7 of 8 steps were." in page.texts
    assert "2 dense, 2 refresh, 3 sparse" in page.texts
    steps = page.sections["Steps"]
    for name in ("0 of section 1, dense", "0 of section 2, dense", "2 of section 2, sparse"):
        assert f"step {name}: " in steps
    assert " 1 of section 2 refresh" in " ".join(steps.split())
    assert "layers 0 to 2, step 5: refresh" in page.sections["Budget of each layer and step"]


def test_a_report_from_python_at_any_time(report):
    from chipsparse.report.generation import GenerationReport

    Path("new.json").write_text(json.dumps(GenerationReport().to_dict()))
    page = report("new.json")
    assert page.headings == ["A generation", "Not on this page"]
    config = chipsparse.SparsityConfig().override(
        {"schedule.actions": ["dense", "refresh", "sparse"], "tile": None}
    )
    pipe = tiny_wan_pipeline()
    sizes = {"height": 32, "width": 48, "num_frames": 5, "num_inference_steps": 3}
    with chipsparse.enable(pipe, config) as handle:
        pipe(PROMPT, **sizes, max_sequence_length=16, output_type="latent")
        Path("python.json").write_text(json.dumps(handle.report.to_dict()))
    page = report("python.json")
    assert page.headings[0] == "A generation"
    assert "Budget of each layer and step" in page.headings
    assert "python.json names no clip" in page.text


def test_a_report_of_an_older_version_says_what_it_lacks(report):
    def older(content):
        for step in content["steps"]:
            for name in OLDER_LACKS:
                del step[name]
            step["bytes_to_device"] = step["bytes_to_host"] = 0

    page = report(changed("r.json", older))
    assert "did not record it; generate again" in page.sections["Not on this page"]


# Sample frames.


def pictures(page):
    """The embedded frames, in order."""
    found = []
    for each in page.all("img"):
        kind, _, content = each["src"].partition(";base64,")
        image = Image.open(io.BytesIO(base64.b64decode(content)))
        assert kind == f"data:image/{image.format.lower()}"
        found.append(np.asarray(image.convert("RGB")))
    return found


def test_the_frames_that_a_report_names(page_of, made):
    page = page_of("r.json")
    found = pictures(page)
    assert [each.shape for each in found] == [FRAME] * 15  # dense, sparse, and their difference
    with Image.open(made / "o-dense.gif") as image:
        for index in range(5):
            image.seek(index)
            expected = np.asarray(image.convert("RGB")).astype(int)
            apart = [np.abs(each - expected).mean() for each in found[:5]]
            assert apart[index] == min(apart) < 8  # it may be a JPEG
    assert "difference x" in page.text
    assert page.all("img")[3]["alt"] == "dense: o-dense.gif, frame 3"


def test_long_and_large_clips_are_shown_in_small(report):
    (folder := Path("frames")).mkdir()
    for index in range(20):
        Image.new("RGB", (700, 500), (index, 0, 0)).save(folder / f"{index}.png")
    page = report("r.json", "--media", "frames")
    found = pictures(page)
    assert len(found) == FRAMES
    assert {max(each.shape) for each in found} == {LARGEST_SIDE}
    assert [each["alt"] for each in page.all("img")][::5] == ["frames, frame 0", "frames, frame 19"]
    assert page.headings.count("Sample frames") == 1


def test_frames_are_found_beside_a_file_that_was_moved(folder, report, monkeypatch):
    Path("moved").mkdir()
    for name in ("r.json", "o.gif", "o-dense.gif"):
        shutil.copy2(name, "moved")
        Path(name).unlink()
    assert len(pictures(report("moved/r.json"))) == 15


def overwrite(path):
    """With something else, at the time when it was written."""
    times = path.stat()
    path.write_bytes(b"no picture")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda path: path.unlink(), "o.gif, which r.json names, is not there"),
        (overwrite, "o.gif could not be read"),
        (
            lambda path: os.utime(path, (2e9, 2e9 + SAME_RUN_SECONDS)),
            "o.gif was written after r.json",
        ),
    ],
)
def test_frames_that_are_not_those_of_the_report_are_left_out(report, spoil, sentence):
    spoil(Path("o.gif"))
    page = report("r.json")
    assert pictures(page) == []
    assert sentence in page.sections["Not on this page"]
    assert "Sample frames" not in page.headings


# The other kinds.


def test_a_tuning(page_of, read):
    results, page = read("p.tune.json"), page_of("p.tune.json")
    assert page.headings[0] == "Tuning of flux"
    pairs = {n: each for n, each in results["measured"].items() if n.startswith("pair, ")}
    candidates = page.sections["Candidates"]
    for pair in pairs.values():
        psnr = "identical" if pair["psnr_db"] is None else f"{pair['psnr_db']:.2f} dB"
        assert pair["form"] in candidates
        assert f"{psnr}\n" in candidates
    held_out = [prompt for each in results["searches"].values() for prompt in each["held_out"]]
    assert all(f"{prompt}, held out\n" in candidates for prompt in held_out)
    quality = page.sections["Quality and speed"]
    assert "target 25 dB" in quality
    assert "chosen" in quality
    assert "Chosen schedule, for a PSNR of at least 25 dB" in page.headings


def a_search(content, **changes):
    (search,) = content["searches"].values()
    search.update(changes)
    return search


def test_the_chosen_schedule_of_a_tuning(report):
    def choose(content):
        a_search(
            content,
            chosen={
                "config": "abc",
                "form": "3 of 6 steps in full",
                "keep_fraction": 0.1,
                "actions": ["dense", "refresh", "sparse", "sparse", "skip", "dense"],
            },
        )

    page = report(changed("p.tune.json", choose), drawn=["What each step does"])
    schedule = page.sections["Chosen schedule, for a PSNR of at least 25 dB"]
    assert "Config abc: 3 of 6 steps in full." in schedule
    for text in (
        "layer 0, step 0: dense",
        "layer 0, step 1: refresh",
        "layer 0, steps 2 to 3: sparse, 10.0% computed",
        "layer 0, step 4: skip",
    ):
        assert f"{text}\n" in schedule
    styles = " ".join(each["style"] for each in page.all("path"))
    assert "fill: var(--refresh);" in styles
    assert "fill: var(--skip);" in styles


def test_a_tuning_that_was_interrupted(report):
    def calibrated_only(content):
        kept = {n: m for n, m in content["measured"].items() if n.startswith("dense")}
        content["measured"] = kept
        del content["searches"]

    page = report(changed("p.tune.json", calibrated_only))
    missing = page.sections["Not on this page"]
    assert "Nothing was tried yet. Run the same tune command again" in missing
    assert "keeps no search" in missing

    def unfinished(content):
        a_search(content, chosen=None)

    page = report(changed("p.tune.json", unfinished), drawn=["PSNR over time of every config"])
    assert "target 25 dB" in page.sections["Quality and speed"]
    assert "was seen to reach the target" in page.sections["Not on this page"]


def test_a_tuning_for_a_limit_of_time(report):
    def limit(content):
        a_search(content, target={"max_seconds": 0.125})

    page = report(changed("p.tune.json", limit), drawn=["PSNR over time of every config"])
    assert "at most 0.125 s" in page.text
    assert "target 25 dB" not in page.text


def test_a_tuning_for_a_speed(report):
    def speed(content):
        a_search(content, target={"min_speedup": 2.0})

    page = report(changed("p.tune.json", speed), drawn=["PSNR over time of every config"])
    assert "at least 2 times the speed" in page.text
    lines = [each["style"] for each in page.all("path") if "var(--fourth)" in each["style"]]
    assert all("stroke-dasharray" in each for each in lines)
    assert len(lines) == 2  # where dense takes twice as long, wide and narrow


def test_two_configs(page_of, read):
    data, page = read("configs.json"), page_of("configs.json")
    median = data["B"]["speedup"]["median"]
    intervals = page.sections["Intervals"]
    shown = f"{median['value']:.2f} ({median['low']:.2f} to {median['high']:.2f})"
    assert shown in intervals
    assert "intervals from 2 prompts are rough" in intervals
    prompts = page.sections["Prompts"]
    assert f"{data['prompts'][1]['B']['psnr_db']:.2f} dB" in prompts
    quality = page.sections["Quality and speed"]
    assert "A makes the same clips as dense and is not in it." in quality
    assert "PSNR of each frame" in page.sections["Frame by frame"]
    assert len(pictures(page)) == 3
    assert "Not on this page" not in page.headings


def test_names_of_older_files_are_read(read):
    """`picture` is now `clip`, and `keep_fraction` is `density` (see the chosen schedule)."""
    content = read("configs.json")
    clip = content.pop("clip")
    assert clip["files"]
    for name in ("clip", "picture"):
        found = read_record(ConfigsComparison, Path("f.json"), {**content, name: clip})
        assert found.clip_files == clip["files"]


def test_two_files(page_of, read):
    data, page = read("files.json"), page_of("files.json")
    assert page.headings[0] == "o.gif against o-dense.gif"
    assert f"{data['psnr_db']:.2f} dB" in page.texts
    frames = page.sections["Frame by frame"]
    for entry in data["per_frame"]:
        assert f"{entry['psnr_db']:.4g}\n" in frames
    assert f"{255 * data['per_frame'][2]['flicker_b']:.4g}\n" in frames
    assert len(pictures(page)) == 15


def test_a_benchmark(report, page_of, read):
    data, page = read("bench.json"), page_of("bench.json")
    for each in data["layers"]:
        shown = f"{each['speedup']:.2f}\N{MULTIPLICATION SIGN}"
        assert shown in page.sections["One layer"]
    words = shlex.split(data["command"])
    words[words.index("--model") + 1] = "tiny"  # the folder's name alone
    assert f"\n{shlex.join(words)}\n" in page.sections["Run it again"]

    def kernels(content):
        content["steps"] = None

    page = report(changed("bench.json", kernels))
    assert "measured by bench without its --kernels" in page.sections["Not on this page"]


def test_several_files_make_one_page(report):
    changed("r.json", lambda content: content["comparison"].update(speedup=3.25, psnr_db=20.0))
    # The measured speed-up would decide which numbers the axis has.
    changed("r.json", lambda content: content["comparison"].update(speedup=0.8), "r.json")
    page = report("r.json", "changed.json", "bench.json", drawn=["Quality over speed"])
    assert [each["href"] for each in page.all("a")] == ["#part-1", "#part-2", "#part-3"]
    assert [each["id"] for each in page.all("article")] == ["part-1", "part-2", "part-3"]
    made = f"{PROMPT[:37]}..., seed 0"
    assert f"2: changed, {made}: 3.25{chr(215)}, 20.00 dB" in page.text
    assert page.external() == []
    shown = page.sections["All files"]
    assert f"\n2: changed, {made}\n3.25{chr(215)}\n20.00 dB\n1: r, {made}\n" in shown
    assert shown.count("\n1\n2\n") == 2  # beside the dots, wide and narrow
    assert "changed.json: " in page.text
    assert "All files" not in report("r.json", "bench.json").headings


# What is refused.


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("{", "bad.json is no JSON: Expecting property name enclosed in double quotes"),
        ("[" * 100_000, "bad.json is no JSON: "),
        ("[1]", "bad.json is no JSON object, which every file of chipsparse is"),
        ("{}", "bad.json is of no kind that report knows: generate --report, a results file of"),
        ('{"schema": 2, "steps": [], "totals": {}}', "bad.json has the schema 2, and this version"),
        (
            '{"format": 9, "about": {}, "measured": {}}',
            "bad.json has the format 9, and this",
        ),
        (
            '{"mode": "sparse", "prompt": "a", "sparse": {}, "dense": null}',
            "bad.json is what generate --json prints; give the file of its --report instead",
        ),
        (
            '{"profile": "p", "results": "p.tune.json", "tuned": {}, "configs_tried": 1}',
            "bad.json is what tune --json prints; give the results file that it names, p.tune.js",
        ),
        (
            '{"schema": 1, "steps": [{"step": -1}], "totals": {}}',
            "bad.json is damaged: steps[0].step is -1; it should be greater than or equal to 0",
        ),
        (
            '{"schema": 1, "steps": 7, "totals": {}}',
            "bad.json is damaged: steps is 7; it should be",
        ),
        ('{"schema": 1, "steps": [], "totals": {}}', "bad.json is damaged: config is missing"),
        (b"\xff\xfe\xff", "bad.json could not be read: it is no text in UTF-8"),
    ],
)
def test_files_that_are_not_what_they_should_be(refused, folder, content, sentence):
    Path("bad.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    Path("page.html").write_text("old")
    assert refused("bad.json", "-o", "page.html").startswith(sentence)
    # One bad file of several, too.
    assert refused("r.json", "bad.json", "-o", "page.html").startswith(sentence)
    assert Path("page.html").read_text() == "old"


@pytest.mark.parametrize(
    ("path", "value", "place"),
    [
        (("steps", 2, "action"), "paint", "steps[2].action is \"paint\"; it should be 'dense', 'r"),
        (
            ("steps", 2, "layers", 1, "kept"),
            "all",
            'steps[2].layers[1].kept is "all"; it should be a valid number',
        ),
        (("steps", 0, "step"), 10**9, "steps[0].step is 1000000000; it should be less than 100000"),
        (("steps", 1, "seconds"), True, "steps[1].seconds is true; it should be a valid number"),
        (("fallbacks",), [1], "fallbacks[0] is 1; it should be a valid string"),
        (("totals", "cache_bytes"), [3], "totals.cache_bytes is [3]; it should be a valid integer"),
        (("steps", 1, "action"), None, "steps[1].action is missing"),
        (("steps", 1, "seconds"), 1e308, "steps[1].seconds is 1e+308; it should be less than"),
    ],
)
def test_damaged_values_are_named_with_their_place(refused, path, value, place):
    def damage(content):
        for name in path[:-1]:
            content = content[name]
        content[path[-1]] = value

    name = changed("r.json", damage)
    assert refused(name, "-o", "page.html").startswith(f"changed.json is damaged: {place}")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == "files.json" else pytest.mark.slow)
        for name in KINDS
        if name != "hostile.json"
    ],
)
@pytest.mark.usefixtures("draws")
def test_no_damaged_file_is_an_error_of_ours(folder, monkeypatch, name):
    """Each value of a file replaced by others: a page or one sentence, never a traceback."""
    monkeypatch.setattr(part, "named_samples", lambda *_: "")
    file, whole = Path(name), shortened(json.loads(Path(name).read_text()))
    seen, sentences = {repr(part.part_of(file, whole).record)}, []
    for path in [each for each in paths(whole) if each]:
        for bad in (None, "x", -1, 1e300, [], {}, [None], {"a": 1}):
            try:
                made = part.part_of(file, replaced(whole, path, bad))
                if (read := repr(made.record)) not in seen:  # and not as any before
                    seen.add(read)
                    page([made])
            except UserError as error:
                sentences.append(str(error))
    assert len(seen) > 20
    assert len(sentences) > 50
    assert all(sentence.startswith(name) for sentence in sentences)


def shortened(value):
    """A copy with two elements of each list, and so of frames, steps and layers."""
    if isinstance(value, dict):
        return {name: shortened(each) for name, each in value.items()}
    return [shortened(each) for each in value[:2]] if isinstance(value, list) else value


def replaced(value, path, bad):
    """A copy with another value at a path."""
    if not path:
        return bad
    found = copy.copy(value)
    found[path[0]] = replaced(value[path[0]], path[1:], bad)
    return found


def paths(value, path=()):
    """Where a value is, and the first of each list."""
    yield path
    if isinstance(value, dict):
        for name, each in value.items():
            yield from paths(each, (*path, name))
    elif isinstance(value, list) and value:
        yield from paths(value[0], (*path, 0))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("no.json", "-o", "page.html"), "the file no.json does not exist"),
        (("r.json", "-o", "page.txt"), "--output page.txt must end in .html"),
        (("r.json", "-o", "page.html", "--media", "no.mp4"), "the file no.mp4 does not exist"),
        (
            ("r.json", "-o", "page.html", "--media", "r.json"),
            "r.json is no .mp4, .webm, .gif, .png",
        ),
    ],
)
def test_mistakes(refused, arguments, sentence):
    assert refused(*arguments).startswith(sentence)


@pytest.mark.parametrize(
    "arguments", [("report", "r.json", "-o", "page.html"), ("compare", "--suite", "flux")]
)
def test_a_page_without_the_library_that_draws_charts(folder, monkeypatch, arguments):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with nothing_written(folder):
        said = command(*arguments).sentence()
    assert "not installed: pip install 'chipsparse[report]'" in said


def test_a_page_that_cannot_be_written_leaves_everything_as_it_was(folder, monkeypatch):
    Path("page.html").write_text("old")
    before = names(folder)

    def full(path, text):
        path.write_text(text[:5])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(report_file, "write_checked", full)
    said = command("report", "r.json", "-o", "page.html").sentence()
    monkeypatch.undo()
    assert "--output page.html could not be written: No space left on device" in said
    assert (folder / "page.html").read_text() == "old"
    assert names(folder) == before
