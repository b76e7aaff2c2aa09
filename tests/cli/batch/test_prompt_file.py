"""Prompts as text, CSV and JSON lines, and what is said of bad ones."""

from pathlib import Path

import pytest

from chipsparse.cli.batch.prompt_file import check_lines, read_lines
from chipsparse.cli.errors import UserError
from chipsparse.cli.prompts import read_prompts
from chipsparse.profiles.profile import ASSETS


@pytest.fixture
def lines(tmp_path):
    """Reads a file of this name and content, in which nothing is wrong."""

    def read(name, content):
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        lines, problems = read_lines(tmp_path / name, print)
        assert not problems
        return [(line.number, line.prompt, dict(line.settings)) for line in lines]

    return read


def test_a_prompt_a_line(lines):
    expected = [(2, "a red circle", {}), (4, "ein Würfel, blau", {})]
    for end in ("\n", "\r\n"):
        text = end.join(["# no", " a red circle ", "", "ein Würfel, blau", ""])
        for coding in ("utf-8", "utf-8-sig", "utf-16"):
            assert lines("p.txt", text.encode(coding)) == expected


def test_csv_has_settings(lines, tmp_path):
    content = (
        "Prompt,SEED,Guidance scale,quality,dense,image\n"
        '"a ""red"" circle, large",7,2.5,fast,true,a.png\n'
        '"two\nlines",,,,,\n'
        ",,,,,\n"
        "a square,8,,,,/b.png\n"
        ",9\n"
    )
    first = {"seed": "7", "guidance_scale": "2.5", "quality": "fast", "dense": "true"}
    assert lines("p.csv", content) == [
        (2, 'a "red" circle, large', {**first, "image": str(tmp_path / "a.png")}),
        (4, "two\nlines", {}),
        (6, "a square", {"seed": "8", "image": "/b.png"}),
        (7, "", {"seed": "9"}),
    ]


@pytest.mark.parametrize(("separator", "name"), [(";", "p.csv"), ("\t", "p.tsv")])
def test_tables_of_other_countries_and_with_columns_of_their_own(lines, tmp_path, separator, name):
    rows = ["prompt;Guidance-Scale;fps;Note;;", "a, b;2.5;29.97;mine;;", ";;;;;"]
    settings = {"guidance_scale": "2.5", "fps": "29.97"}
    assert lines(name, "\r\n".join(rows).replace(";", separator)) == [(2, "a, b", settings)]
    said = []
    read_lines(tmp_path / name, said.append)
    assert said == [f"{tmp_path / name}: no setting, and ignored: note"]


def test_json_lines_have_settings(lines):
    content = (
        '\ufeff{"prompt": "a", "height": 32, "guidance_scale": 3, "crf": null, "dense": true}\r\n'
        "\n"
        '{"seed": 18446744073709551615, "prompt": "", "negative_prompt": "b"}'
    )
    assert lines("p.jsonl", content) == [
        (1, "a", {"height": 32, "guidance_scale": 3, "dense": "true"}),
        (3, "", {"seed": 2**64 - 1, "negative_prompt": "b"}),
    ]


@pytest.mark.parametrize(
    ("name", "line", "sentence"),
    [
        ("p.jsonl", '{"prompt": "a"', "it is no JSON: "),
        ("p.jsonl", '{"seed": 1}', "it has no prompt"),
        ("p.jsonl", '{"prompt": "a", "hight": 3}', "hight is no setting of a line, which has seed"),
        ("p.jsonl", '{"prompt": "a", "fps": 24, "FPS": 1}', "fps stands twice"),
        ("p.csv", "prompt,seed\na,1,2", "it has more cells than columns: ['2']"),
    ],
)
def test_bad_lines_are_told(tmp_path, name, line, sentence):
    (tmp_path / name).write_text(line + "\n")
    lines, problems = read_lines(tmp_path / name, print)
    assert lines == []
    (told,) = problems.values()
    assert told.startswith(sentence)
    assert [*problems] == [line.count("\n") + 1]


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("p.csv", b"text,seed\na,1\n", "has no column prompt; its columns are: text, seed"),
        ("p.csv", b'prompt\n"a\n', "is no CSV behind line 1: unexpected end"),
        ("p.txt", b"\xff\xfe\xfa", "it is no text in UTF-8"),
        ("p.json", b"[]", r"p\.json is JSON; write JSON lines"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, name, content, sentence):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=sentence):
        read_lines(tmp_path / name, print)


def test_all_bad_lines_are_named_as_far_as_there_is_room():
    named = r"^25 of 30 prompts of p\.txt are wrong: line 1: no 1; .* 20: no 20; and 5 more$"
    with pytest.raises(UserError, match=named):
        check_lines(Path("p.txt"), {number: f"no {number}" for number in range(1, 26)}, count=30)
    same = {1: "no such profile", 2: "no such profile"}
    for count, sentence in ((2, "^no such profile$"), (3, "^2 of 3")):  # about the lines or not
        with pytest.raises(UserError, match=sentence):
            check_lines(Path("p.txt"), same, count=count)


def test_paths_count_from_the_folder_of_the_file(tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "a", "config": "c.yaml", "image": "sub/i.png"}\n')
    (line,), _ = read_lines(file, print)
    expected = {"config": str(tmp_path / "c.yaml"), "image": str(tmp_path / "sub/i.png")}
    assert line.settings == expected


def test_bundled_prompts_by_name(workdir):
    expected = read_prompts(ASSETS / "prompts" / "images.txt")
    assert read_prompts(Path("images")) == expected
    lines, problems = read_lines(Path("images"), print)
    assert [line.prompt for line in lines] == expected
    assert problems == {}
    (workdir / "images").mkdir()  # such as an output folder
    assert read_prompts(Path("images")) == expected
    (workdir / "images").rmdir()
    (workdir / "images").write_text("a prompt of my own\n")
    assert read_prompts(Path("images")) == ["a prompt of my own"]
    for missing in ("no-such", "folder/images"):
        with pytest.raises(UserError, match=f"--prompts {missing} could not be read: No such file"):
            read_prompts(Path(missing))
