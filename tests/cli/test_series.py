"""Several prompts and seeds in one run: names, what is written, and what a failure leaves."""

import json
from pathlib import Path

import pytest

from chipsparse.cli import option_checks
from chipsparse.cli.errors import UserError
from chipsparse.cli.generate import job
from chipsparse.cli.generate.series import series
from chipsparse.cli.prompts import read_prompts, typed_prompt
from chipsparse.experiments import clips as denoise
from tests.cli.conftest import names

SMALL = ("--frames", "1", "--steps", "3")


def items(prompts, **options):
    given = {"seed": 0, "num": None, "output": Path("a/out.mp4"), "report": None, "many": True}
    return series(prompts, **(given | options))


def test_one_picture_keeps_its_name():
    (only,) = items(["a"], seed=3, many=False, report=Path("r.json"))
    assert (only.prompt, only.seed, only.label) == ("a", 3, "")
    assert (only.output, only.report) == (Path("a/out.mp4"), Path("r.json"))


def test_a_series_has_all_seeds_of_each_prompt_and_numbered_names():
    made = items(["a", "b"], seed=5, num=2, report=Path("r.json"))
    assert [(item.prompt, item.seed) for item in made] == [("a", 5), ("a", 6), ("b", 5), ("b", 6)]
    assert [str(item.output) for item in made] == [f"a/out-00{i}.mp4" for i in range(4)]
    assert [str(item.report) for item in made] == [f"r-00{i}.json" for i in range(4)]
    assert made[2].label == "3 of 4"


def test_a_series_of_one_is_numbered_too():
    assert [str(item.output) for item in items(["a"])] == ["a/out-000.mp4"]


def test_names_of_long_series_sort():
    made = items(["a"], num=1001)
    assert (made[0].output.name, made[-1].output.name) == ("out-0000.mp4", "out-1000.mp4")


def test_a_file_of_prompts(tmp_path):
    file = tmp_path / "p.txt"
    file.write_text("\ufeff# shapes\n a red circle \n\n#no\nein blauer Würfel\n", encoding="utf-8")
    assert read_prompts(file) == ["a red circle", "ein blauer Würfel"]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"# nothing\n\n", "has no prompt; write one a line"),
        (b"\xff\xfe\xfa", "could not be read: it is no text in UTF-8$"),
    ],
)
def test_files_without_prompts(tmp_path, content, sentence):
    (tmp_path / "p.txt").write_bytes(content)
    with pytest.raises(UserError, match=sentence):
        read_prompts(tmp_path / "p.txt")


def test_a_prompt_that_the_locale_took_for_bytes():
    as_ascii = "ein Würfel".encode().decode("ascii", "surrogateescape")
    assert typed_prompt(as_ascii) == "ein Würfel"
    with pytest.raises(UserError, match="bytes that are no text in UTF-8"):
        typed_prompt(b"caf\xe9".decode("ascii", "surrogateescape"))


def test_more_than_can_be_listed(generate, workdir, loads_nothing, monkeypatch):
    given = ("-o", "o.png", "--num")
    assert generate(*given, "100001").sentence() == (
        "--num 100001 is too large; it must be at most 100000"
    )
    monkeypatch.setattr(option_checks, "MOST_CLIPS", 5)
    (workdir / "p.txt").write_text("a\nb\n")
    assert generate("--prompts", "p.txt", *given, "3", prompt=None).sentence() == (
        "--prompts p.txt asks for 6 clips; one command makes at most 5"
    )


def test_the_model_is_loaded_once_and_patched_once(generate, workdir, monkeypatch):
    calls = []
    for name in ("load_pipeline", "Runner"):
        function = getattr(job, name)
        monkeypatch.setattr(
            job, name, lambda *a, f=function, n=name, **k: (calls.append(n), f(*a, **k))[1]
        )
    (workdir / "p.txt").write_text("a red circle\na blue square\n")
    given = ("--prompts", "p.txt", "--num", "2", "-o", "o.png", "--report", "r.json", "--json")
    content = generate(*SMALL, *given, "--seed", "7", prompt=None).json()
    assert calls == ["load_pipeline", "Runner"]
    assert [(each["prompt"], each["seed"]) for each in content] == [
        ("a red circle", 7),
        ("a red circle", 8),
        ("a blue square", 7),
        ("a blue square", 8),
    ]
    assert [each["files"] for each in content] == [
        {"output": [f"o-00{i}.png"], "report": [f"r-00{i}.json"]} for i in range(4)
    ]
    assert names(workdir) == sorted(
        ["p.txt", *(f"o-00{i}.png" for i in range(4)), *(f"r-00{i}.json" for i in range(4))]
    )
    for index, each in enumerate(content):
        report = json.loads((workdir / f"r-00{index}.json").read_text())
        assert report["request"]["seed"] == each["seed"]
        actions = [step["action"] for step in each["sparse"]["steps"]]
        assert actions == ["dense", "refresh", "sparse"]


def test_each_picture_is_that_of_a_run_of_its_own(generate, workdir):
    generate(*SMALL, "--num", "2", "--seed", "4", "-o", "o.png").fine()
    generate(*SMALL, "--seed", "5", "-o", "alone.png").fine()
    assert (workdir / "o-001.png").read_bytes() == (workdir / "alone.png").read_bytes()
    assert (workdir / "o-000.png").read_bytes() != (workdir / "alone.png").read_bytes()


def test_compare_of_a_series(generate, workdir):
    ran = generate(*SMALL, "--num", "2", "-o", "o.png", "--compare").fine()
    assert names(workdir) == sorted(
        f"o-00{i}{kind}.png" for i in range(2) for kind in ("", "-dense", "-compare")
    )
    rows = [line.split() for line in ran.stdout.splitlines()]
    (first,) = [row for row in rows if row[:2] == ["o-000.png", "0"]]
    assert "dB" in first
    assert "2 of 2 made" in ran.stdout
    assert ran.stderr.count("warming up") == 2  # each side once


@pytest.fixture
def breaks_at(monkeypatch):
    """Lets the generation of one seed fail with an error."""

    def arrange(seed, error):
        made = denoise.generate

        def generate(*arguments, **options):
            if options["seed"] == seed:
                raise error
            return made(*arguments, **options)

        monkeypatch.setattr(denoise, "generate", generate)

    return arrange


def test_a_failure_does_not_lose_the_others(generate, workdir, breaks_at):
    breaks_at(1, UserError("the model produced values that are not finite"))
    given = (*SMALL, "--num", "3", "-o", "o.png", "--report", "r.json")
    ran = generate(*given, "--json")
    assert ran.exit_code == 1
    assert [each["error"] for each in json.loads(ran.stdout)] == [
        None,
        "the model produced values that are not finite",
        None,
    ]
    expected = ["o-000.png", "o-002.png", "r-000.json", "r-001.json", "r-002.json"]
    assert names(workdir) == expected
    failed = json.loads((workdir / "r-001.json").read_text())
    assert failed["error"].startswith("UserError: the model produced")
    assert failed["steps"] == []  # not those of the picture before
    ran = generate(*given)
    assert "2 of 3 made, 1 failed" in ran.stdout
    assert "chipsparse: error: 2 of 3: the model produced" in ran.stderr


def test_an_interruption_keeps_and_tells_what_was_made(generate, workdir, breaks_at):
    breaks_at(1, KeyboardInterrupt())
    ran = generate(*SMALL, "--num", "3", "-o", "o.png")
    assert ran.exit_code == 130
    assert "1 of 3 made" in ran.stdout
    assert ran.stderr.splitlines()[-1] == ("chipsparse: interrupted, 1 of the series was written")
    assert names(workdir) == ["o-000.png"]


@pytest.mark.parametrize(
    ("arguments", "prompt", "sentence"),
    [
        ((), None, "give a prompt, or a file of them with --prompts; got neither"),
        (("--prompts", "p.txt"), "a", "give a prompt, or a file of them with --prompts; not both"),
        (("--prompts", "no.txt"), None, "could not be read: No such file or directory\n"),
        (("--num", "2", "-o", "o.gif"), "a", "--output o-001.gif is a folder; name a file in it"),
        (("--num", "2", "--report", "r.json"), "a", "--report r-001.json is a folder"),
    ],
)
def test_what_is_wrong_with_a_series_is_found_before_loading(
    generate, workdir, loads_nothing, arguments, prompt, sentence
):
    (workdir / "p.txt").write_text("a\n")
    for folder in ("o-001.gif", "r-001.json"):
        (workdir / folder).mkdir()
    error = generate(*arguments, prompt=prompt).refused()
    assert sentence in error
    assert error.count("\n") == 1


def test_an_empty_prompt_warns(generate):
    ran = generate(*SMALL, "-o", "o.png", "--json", prompt="").fine()
    sentence = "the prompt is empty: the result shows whatever the model likes"
    assert json.loads(ran.stdout)["warnings"] == [sentence]
    assert f"chipsparse: warning: {sentence}\n" in ran.stderr
