"""`chipsparse compare` of two configs and of two files."""

import json
import re
from pathlib import Path

import imageio.v3 as iio
import numpy as np
import pytest

from chipsparse.cli.compare import ways
from chipsparse.cli.compare.options import read_config
from chipsparse.cli.compare.record import Comparison, FilesComparison
from chipsparse.cli.compare.ways import Row
from chipsparse.cli.media import write as media
from chipsparse.cli.media.panels import GAP_PIXELS, choose_factor, difference, heat_map
from chipsparse.cli.views.terminal import print_result
from chipsparse.experiments import quality
from chipsparse.experiments.lpips import Lpips
from chipsparse.experiments.records import ClipRecord
from chipsparse.experiments.statistics import Estimate, draws, interval
from chipsparse.profiles.profile import ASSETS
from tests.cli.conftest import PROFILE, command
from tests.cli.html_reader import PageReader
from tests.tiny_models import PROMPT

CLASS = "FluxTransformer2DModel"
SCHEDULE = "schedule: {periodic: {warmup: 2, refresh_every: 10}}"
PROMPTS = [PROMPT, "a blue square moves up", "a white triangle grows and a black circle shrinks"]


def write_files(folder):
    (folder / "prompts.txt").write_text("# shapes\n" + "\n".join(PROMPTS) + "\n\n")
    skips = "schedule: {actions: [dense, refresh, skip, sparse]}"
    (folder / "skips.yaml").write_text(PROFILE.replace(SCHEDULE, skips))


@pytest.fixture
def compare(model_folder, workdir):
    write_files(workdir)

    def run(*arguments, model=model_folder, prompts="prompts.txt"):
        given = ["compare", *map(str, arguments), "--model", str(model)]
        return command(*given + (["--prompts", prompts] if prompts else []))

    return run


@pytest.fixture(scope="module")
def compared(model_folder, tmp_path_factory):
    """The JSON, the standard error and the folder of a comparison of two configs."""
    folder = tmp_path_factory.mktemp("compared")
    with pytest.MonkeyPatch.context() as here:
        here.chdir(folder)
        write_files(folder)
        given = ["compare", "profile", "skips.yaml", "--model", str(model_folder), "--seed", "5"]
        ran = command(*given, "--prompts", "prompts.txt", "-o", "worst.png", "--json")
    (folder / "c.json").write_text(ran.fine().stdout)
    return ran.json(), ran.stderr, folder


def rows_of(content):
    """The clips of dense, A and B, by these names."""
    made = {row["name"].partition(":")[0]: row["clips"] for row in content["rows"]}
    return {name: [ClipRecord.model_validate(clip) for clip in own] for name, own in made.items()}


def test_it_compares_what_generate_makes_with_the_same_seeds(compared, generate):
    content, _, folder = compared
    own = rows_of(content)
    for records in own.values():
        assert [(r.prompt, r.seed) for r in records] == list(zip(PROMPTS, (5, 6, 7), strict=True))
    profiles = {"dense": ["--dense"], "A": [], "B": ["--config", str(folder / "skips.yaml")]}
    made = {}
    for name, arguments in profiles.items():
        generate("-o", f"{name}.png", "--seed", "5", *arguments).fine()
        made[name] = np.stack([iio.imread(f"{name}-00{n}.png") for n in range(5)])
    for side in "AB":
        record = own[side][0]
        expected = quality.compare_clips(made["dense"], made[side])
        assert record.psnrs == pytest.approx(expected.psnrs)
        for name in ("psnr_db", "ssim", "flicker", "flicker_change", "largest_difference"):
            assert getattr(record, name) == pytest.approx(getattr(expected, name))
    assert own["A"][0].psnr_db != own["B"][0].psnr_db


def test_intervals_are_those_of_the_prompts(compared):
    content, stderr, _ = compared
    own = rows_of(content)
    drawn = draws(3)
    summaries = {row["name"][0]: row["summary"] for row in content["rows"]}
    for name in ("psnr_db", "ssim", "flicker_change", "seconds", "speedup"):
        values = {side: np.array([getattr(r, name) for r in own[side]]) for side in "AB"}
        both = ((summaries[side], values[side]) for side in "AB")
        for summary, series in (*both, (content["difference"], values["B"] - values["A"])):
            expected = interval(series, ways.METRICS[name].statistic, drawn)
            assert summary[name] == pytest.approx(expected.model_dump())
    for dense, a in zip(own["dense"], own["A"], strict=True):
        assert a.speedup == pytest.approx(dense.seconds / a.seconds)
    assert "lpips" not in summaries["A"]
    assert content["lpips_missing"]
    lines = [line for line in stderr.splitlines() if ": step " in line]
    assert len(lines) == 9 * 4
    assert all(" s elapsed" in line for line in lines), lines


def test_the_clip_is_that_of_the_worst_prompt_and_the_page_shows_it(compared, monkeypatch):
    content, _, folder = compared
    own = rows_of(content)
    sides = [[record.psnr_db for record in own[side]] for side in "AB"]
    worst = int(np.min(sides, axis=0).argmin())
    assert content["seed"] == 5 + worst
    shown = np.stack([iio.imread(folder / file) for file in content["clip"]["files"]])
    assert shown.shape[2] == 3 * 48 + 2 * GAP_PIXELS
    strip = (shown.shape[1] - 2 * 32 - GAP_PIXELS) // 2
    row = shown[:, strip : strip + 32]
    wide = 48 + GAP_PIXELS
    dense, a, b = (row[:, :, left : left + 48] for left in (0, wide, 2 * wide))
    for side, frames in (("A", a), ("B", b)):
        assert quality.psnr(dense / 255, frames / 255) == pytest.approx(own[side][worst].psnr_db)
    assert not shown[:, -32:, :48].any()
    differences = [difference(dense, side) for side in (a, b)]
    heat = heat_map(differences[1], factor := choose_factor(differences))
    np.testing.assert_array_equal(shown[:, -32:, -48:], heat)
    assert content["clip"]["amplified"] == factor
    monkeypatch.chdir(folder)
    command("report", "c.json", "-o", "c.html").fine()
    reader = PageReader((folder / "c.html").read_text())
    assert (reader.problems, reader.external()) == ([], [])
    mean = np.mean(sides[0])
    assert f"PSNR {mean:.2f} dB, 3 of 3" in reader.sections["A: profile, B: skips.yaml"]
    speed = f"B: skips.yaml, seed 6: {own['B'][1].speedup:.2f}\N{MULTIPLICATION SIGN}"
    assert f"{speed}, {own['B'][1].psnr_db:g}" in reader.sections["Quality and speed"]
    assert {"Numbers", "Intervals", "Frame by frame", "Prompts"} <= set(reader.headings)
    assert PROMPTS[2] in reader.sections["Prompts"]
    assert len(reader.all("img")) == 1


def test_dense_as_a_side_is_the_reference_itself_and_tables(compare, capsys):
    content = compare("dense", "profile", "--count", "2", "--json").json()
    assert [row["name"] for row in content["rows"]] == ["dense", "B: profile"]
    assert content["sides"] == ["A: dense", "B: profile"]
    summary = content["rows"][0]["summary"]
    assert summary["psnr_db"]["value"] is None
    assert (summary["ssim"]["value"], summary["speedup"]["value"]) == (1.0, 1.0)
    assert "psnr_db" not in content["difference"]
    # Of two values, a quarter of the resamples is twice the one and a quarter twice the other.
    psnrs = sorted(record.psnr_db for record in rows_of(content)["B"])
    mean = content["rows"][1]["summary"]["psnr_db"]
    assert (mean["low"], mean["high"]) == tuple(psnrs)
    print_result(Comparison(**content), as_json=False)
    shown = capsys.readouterr().out
    for title in ("B: profile", "B - A"):
        assert re.search(rf"^ {title} +value +95% interval", shown, re.M)
    assert len(re.findall(r"^ mean PSNR, dB +\S+ +\S+ to \S+ *$", shown, re.M)) == 1
    between = r"\S+(?: to \S+)?"  # one figure where both bounds round to it, as timings may
    assert len(re.findall(rf"^ median speed-up +\S+ +{between} *$", shown, re.M)) == 2
    assert re.search(r"LPIPS +not measured: \w", shown)
    assert "intervals from 2 prompts are rough" in shown


@pytest.mark.parametrize("complete", [1, 2])
def test_an_interrupt_keeps_what_gives_intervals(compare, workdir, breaks_at, complete):
    breaks_at(complete, KeyboardInterrupt())
    ran = compare("dense", "profile", "--json", "-o", "worst.png")
    assert ran.exit_code == 130
    if complete == 1:
        assert ran.stdout == ""
        assert ran.stderr.splitlines()[-1] == "chipsparse: interrupted, nothing was written"
        assert not list(workdir.glob("*.png"))
    else:
        head = Comparison(**json.loads(ran.stdout)).sections()[0].parts
        assert head[0].text == "2 of 3 prompts are made"
        assert len(list(workdir.glob("*.png"))) == 5


def clip(seed=0, psnr_db=30.0, ssim=0.9, lpips=None, **fields):
    values = {"way": "x", "prompt": "p", "seed": seed, "seconds": 2.0, "speedup": 2.0, **fields}
    return ClipRecord(psnr_db=psnr_db, ssim=ssim, lpips=lpips, **values)


def test_a_row_is_the_mean_and_the_worst_of_its_clips():
    same = clip(2, None, 1.0, identical=True, notes=["a note"])
    row = Row.of("x", [clip(0, 24.0, 0.9), clip(1, 30.0, 0.5), same], remarks=["first"])
    assert (row.quality("psnr_db").mean, row.quality("psnr_db").worst) == (27.0, 24.0)
    assert (row.quality("ssim").mean, row.quality("ssim").worst) == (pytest.approx(0.8), 0.5)
    assert row.quality("lpips") is None
    assert row.pass_text == "2 of 3"
    note = "1 of 3 clips are bit for bit as dense; the PSNR is the others'"
    assert list(row.remarks) == ["first", "a note", note]
    assert (row.summary["psnr_db"].value, row.summary["ssim"].value) == (None, pytest.approx(0.8))
    row = Row.of("x", [same])
    assert row.remarks[-1] == "every clip is bit for bit as dense"
    assert (row.quality("psnr_db"), row.pass_text) == (None, "1 of 1 \N{CHECK MARK}")
    assert row.summary == {}  # an interval needs two
    refused = Row.of("x", [], refused="no file")
    assert refused.notes == ["x: did not run: no file"]


def test_a_clip_passes_within_the_bound_of_all_that_was_measured():
    for values in ((20.0, 0.82, 0.2), (30.0, 0.9, None), (None, 1.0, 0.0)):
        assert ways.passes(clip(0, *values)), values
    for values in ((19.99, 0.9, 0.1), (30.0, 0.8199, 0.1), (30.0, 0.9, 0.2001)):
        assert not ways.passes(clip(0, *values)), values


def test_numbers_for_people_and_differences_that_may_be_zero():
    assert ways.METRICS["psnr_db"].text(34.567) == "34.57"
    assert ways.METRICS["psnr_db"].text(None) == "the same"
    assert ways.METRICS["ssim"].text(-0.00002, sign=True) == "-2.0e-05"
    assert ways.METRICS["ssim"].text(0.0, sign=True) == "+0.0000"
    assert ways.METRICS["flicker_change"].text(0.01, sign=True) == "+2.550"
    above = Estimate(value=1.0, low=0.5, high=2.0)
    around = Estimate(value=0.1, low=-1.0, high=0.0)
    said = ways.zeros_text({"psnr_db": above, "ssim": around, "seconds": around})
    assert said == "may be zero, as the interval includes it: SSIM, seconds"
    assert ways.zeros_text({"ssim": above}) == "no interval includes zero"


def test_a_config_is_known_by_its_name_alone():
    assert read_config("dense") == {"dense": True}
    assert read_config("profile") == {}
    assert read_config("fast") == {"quality": "fast"}
    assert read_config(CLASS) == {"config": ASSETS / "profiles" / f"{CLASS}.yaml"}
    assert read_config("tuned/PROFILE.YML") == {"config": Path("tuned/PROFILE.YML")}
    assert [read_config(file) for file in ("./dense", "out.mp4", "frames")] == [None] * 3


@pytest.fixture
def pair(workdir):
    """`a.png` and `b.png`, whose frame 3 is 16 lighter in one channel of 8x8 pixels."""
    time, row, column = np.mgrid[:5, :32, :48]  # smooth, so that encoders change little
    channels = (5 * column, 4 * row + 8 * time, np.full_like(row, 90))
    a = np.stack(channels, axis=-1).clip(0, 255).astype(np.uint8)
    b = a.copy()
    b[3, 4:12, 8:16, 2] += 16
    media.write_media({workdir / "a.png": a, workdir / "b.png": b}, fps=8)
    return a, b


def test_files_as_json_as_a_table_and_as_a_page(pair, workdir, monkeypatch, capsys):
    distance = Lpips(lambda a, b: float((a - b).abs().max()), None)
    monkeypatch.setattr("chipsparse.cli.compare.files.find_lpips", lambda *_: distance)
    ran = command("compare", "a.png", "b.png", "--json")
    content = ran.json()
    expected = quality.compare_clips(*pair, perceptual=distance.measure)
    assert content["per_frame"].keys() == expected.per_frame.keys()
    for name in ("psnr_db", "ssim", "lpips"):
        assert content[name] == pytest.approx(getattr(expected, name))
    assert [content[name] for name in ("kind", "a", "b")] == ["files", "a.png", "b.png"]
    assert [content[name] for name in ("frames", "height", "width")] == [5, 32, 48]
    assert [content[name] for name in ("lossy", "lpips_missing", "clip")] == [[], None, None]
    print_result(FilesComparison(**content), as_json=False)
    shown = capsys.readouterr().out
    psnr = f"{expected.psnr_db:.2f} dB"
    assert re.search(rf"PSNR +{psnr} +{expected.psnrs[3]:.2f} dB +3", shown)
    assert re.search(rf"SSIM +{expected.ssim:.4f} +{expected.per_frame['ssim'][3]:.4f} +3", shown)
    assert re.search(r"LPIPS +0.0125 +0.0627 +3", shown)
    assert re.search(r"largest difference +16 of 255", shown)
    assert "5 frames of 48x32 pixels" in shown
    assert "encoder" not in shown
    (workdir / "f.json").write_text(ran.stdout)
    command("report", "f.json", "-o", "f.html").fine()
    reader = PageReader((workdir / "f.html").read_text())
    assert psnr in reader.sections["b.png against a.png"]
    assert "flicker of A, of 255" in reader.sections["Frame by frame"]
    assert len(reader.all("img")) == 3 * 5
    same = command("compare", "a.png", "a.png").stdout
    assert re.search(r"PSNR +identical +identical +all", same)
    assert "none: the same pixels in every frame" in same


def test_the_clip_of_files(pair):
    clip = command("compare", "a.png", "b.png", "-o", "out.png", "--json").json()["clip"]
    assert clip["files"] == [f"out-00{n}.png" for n in range(5)]
    assert clip["amplified"] == 8
    shown = np.stack([iio.imread(file) for file in clip["files"]])
    left, middle, right = (shown[:, -32:, first : first + 48] for first in (0, 52, 104))
    np.testing.assert_array_equal(left, pair[0])
    np.testing.assert_array_equal(middle, pair[1])
    expected = np.zeros((5, 32, 48), np.uint8)
    expected[3, 4:12, 8:16] = 16
    np.testing.assert_array_equal(right, heat_map(expected, 8))
    ran = command("compare", "a.png", "b.png", "-o", "out.gif", "--amplify", "3").fine()
    assert "difference x3: white is 85 of 255 or more" in ran.stdout
    ran = command("compare", "a.png", "b.png", "-o", "out.gif", "--amplify", "1").fine()
    assert "white is 255 of 255 " in ran.stdout
    assert "or more" not in ran.stdout


def test_videos_keep_their_rate_and_lossy_formats_are_named(pair, workdir):
    a, b = pair
    media.write_media({workdir / "a.mp4": a, workdir / "b.mp4": b, workdir / "a.gif": a}, fps=8)
    for given, fps in (((), 8.0), (("--fps", "24"), 24.0)):
        command("compare", "a.mp4", "b.mp4", "-o", "out.mp4", *given).fine()
        assert iio.immeta("out.mp4")["fps"] == fps
    content = command("compare", "a.mp4", "a.gif", "--json").json()
    assert content["lossy"] == ["a.mp4", "a.gif"]
    assert 30 < content["psnr_db"] < 60
    assert "a.gif: part of the difference may" in command("compare", "a.png", "a.gif").fine().stdout
    assert "encoder" not in command("compare", "a.gif", "a.gif").fine().stdout  # there is none


def test_bounds_of_files_decide_the_exit_code(pair):
    ran = command("compare", "a.png", "b.png", "--min-psnr", "30", "--max-pixel", "16").fine()
    assert "every frame keeps them" in " ".join(ran.stdout.split())
    # The whole clip keeps this bound, and frame 3 does not.
    overall = quality.compare_clips(*pair).psnr_db
    worst = quality.compare_clips(pair[0][3:4], pair[1][3:4]).psnr_db
    between = (overall + worst) / 2
    ran = command("compare", "a.png", "b.png", "--min-psnr", between, "--min-ssim", "0.1")
    assert ran.exit_code == 1
    assert f"failed: PSNR {worst:.4g} dB in frame 3 breaks PSNR >= {between:g} dB" in ran.stderr
    assert "SSIM" not in ran.stderr
    assert "broken" in ran.stdout
    ran = command("compare", "a.png", "b.png", "--max-pixel", "15", "--json")
    content = json.loads(ran.stdout)
    assert (ran.exit_code, content["passed"], content["identical"]) == (1, False, False)
    assert content["bounds"] == {"max_pixel": 15}
    (sentence,) = content["broken"]
    assert sentence == (
        "largest pixel difference 16 of 255 in frame 3 breaks largest pixel difference <= 15 of 255"
    )


def test_identical_files_and_no_bounds(pair):
    same = command("compare", "a.png", "a.png", "--max-pixel", "0", "--min-ssim", "1", "--json")
    content = same.json()
    assert (content["passed"], content["identical"], content["psnr_db"]) == (True, True, None)
    content = command("compare", "a.png", "b.png", "--json").json()
    assert (content["passed"], content["bounds"], content["broken"]) == (None, {}, [])


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--min-ssim", "1.1"), "--min-ssim"),
        (("--max-pixel", "256"), "--max-pixel"),
        (("--min-psnr", "0"), "--min-psnr"),
        (("--max-lpips", "0.1"), "--max-lpips 0.1 needs LPIPS: no weights"),
    ],
)
def test_bounds_that_cannot_be_judged_are_refused(pair, monkeypatch, words, sentence):
    where = "chipsparse.cli.compare.files.find_lpips"
    monkeypatch.setattr(where, lambda *_: Lpips(None, "no weights"))
    assert sentence in command("compare", "a.png", "b.png", *words).sentence()


def test_frames_that_are_too_small_for_a_bound_are_refused(workdir):
    media.write_media({workdir / "s.png": np.zeros((1, 8, 8, 3), np.uint8)}, fps=8)
    said = command("compare", "s.png", "s.png", "--min-ssim", "0.9").sentence()
    assert said == "min_ssim 0.9: SSIM was not measured"


def test_bounds_of_configs_name_the_worst_prompt(compare):
    words = ("dense", "skips.yaml", "--num", "2", "--json")
    ran = compare(*words, "--max-pixel", "0")
    content = json.loads(ran.stdout)
    assert (ran.exit_code, content["passed"], content["identical"]) == (1, False, False)
    row = content["rows"][-1]
    worst = max(row["clips"], key=lambda clip: clip["largest_difference"])
    (sentence,) = content["broken"]
    assert sentence == (
        f"B: skips.yaml: {worst['largest_difference']} of seed {worst['seed']} breaks "
        "largest pixel difference <= 0"
    )
    assert sentence in ran.stderr


def test_the_usual_bounds_are_those_that_the_docs_show_of_a_quality():
    text = (Path(__file__).parents[2] / "docs/performance.md").read_text()
    titles = re.search(r"\| method \| (.*) \|", text)[1].split(" | ")
    lines = re.findall(r"\| chipsparse, .*? \| (.*) \|", text)[:2]
    for title, *cells in zip(titles, *(line.split(" | ") for line in lines), strict=True):
        name = title.split("`")[1]
        shown = [float(cell.partition("(")[2].rstrip(")")) for cell in cells if cell != "-"]
        bound = ways.usual_bounds(name)["psnr_db"]
        assert bound == pytest.approx(max(20.0, *shown), abs=0.15), name
    lost = clip(0, 21.0, 0.9)
    assert ways.passes(lost)
    row = Row.of("fast", [clip(1, 33.0, 0.9), lost], bounds=ways.usual_bounds("fast"))
    assert row.pass_text == "1 of 2"
    assert row.bounds_text == "PSNR >= 22 dB is broken, SSIM >= 0.82 holds"
    assert row.broken() == ["fast: 21.00 of seed 0 breaks PSNR >= 22 dB"]
    titles = ways.numbers_table([row]).columns
    assert "PSNR, dB: mean (worst clip)" in titles
    assert Row.of("x", [], refused="no file", bounds={"ssim": 0.9}).broken() == [
        "x: did not run, so no bound holds",
    ]
