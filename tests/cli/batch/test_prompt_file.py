"""Prompts as text, CSV and JSON lines, and what is said of bad ones."""

from pathlib import Path

import pytest

from chipsparse.cli.batch.prompt_file import check_lines, read_lines
from chipsparse.cli.errors import UserError


@pytest.fixture
def lines(tmp_path):
    """Reads a file of this name and content."""

    def read(name, content):
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        return [
            (each.number, each.prompt, dict(each.settings)) for each in read_lines(tmp_path / name)
        ]

    return read


def test_a_prompt_a_line(lines):
    expected = [(2, "a red circle", {}), (4, "ein Würfel, blau", {})]
    for end in ("\n", "\r\n", "\r"):
        text = end.join(["# no", " a red circle ", "", "ein Würfel, blau", ""])
        for coding in ("utf-8", "utf-8-sig", "utf-16"):
            assert lines("p.txt", text.encode(coding)) == expected


def test_csv_has_settings_of_the_types_of_their_options(lines, tmp_path):
    content = (
        "Prompt,SEED,Guidance scale,quality,dense,image\n"
        '"a ""red"" circle, large",7,2.5,fast,true,a.png\n'
        '"two\nlines",,,,,\n'
        ",,,,,\n"
        "a square,8,,,,/b.png\n"
    )
    assert lines("p.csv", content) == [
        (
            2,
            'a "red" circle, large',
            {
                "seed": 7,
                "guidance_scale": 2.5,
                "quality": "fast",
                "dense": True,
                "image": tmp_path / "a.png",
            },
        ),
        (3, "two\nlines", {}),
        (6, "a square", {"seed": 8, "image": Path("/b.png")}),
    ]


def test_tables_of_other_countries_and_with_columns_of_their_own(lines, tmp_path):
    for separator, name in ((";", "p.csv"), ("\t", "p.tsv"), (";", "sep.csv")):
        head = "sep=;\r\n" if name == "sep.csv" else ""
        rows = ["prompt;Guidance-Scale;fps;Note;;", "a, b;2,5;30000/1001;mine;;", ";;;;;"]
        content = head + "\r\n".join(rows).replace(";", separator)
        first = 3 if head else 2
        assert lines(name, content) == [
            (first, "a, b", {"guidance_scale": 2.5, "fps": 30000 / 1001})
        ]
        assert [line.ignored for line in read_lines(tmp_path / name)] == [["note"]]


def test_json_lines_have_settings(lines):
    content = (
        '\ufeff{"prompt": "a", "height": 32, "guidance_scale": 3, "crf": null, "fps": 24}\r\n'
        "\n"
        '{"seed": 18446744073709551615, "prompt": "", "negative_prompt": "b"}'
    )
    assert lines("p.jsonl", content) == [
        (1, "a", {"height": 32, "guidance_scale": 3.0, "fps": 24}),
        (3, "", {"seed": 2**64 - 1, "negative_prompt": "b"}),
    ]


JSON_MISTAKES = [
    ('{"prompt": "a"', "it is no JSON: "),
    ('{"prompt": "a", "prompt": "b"}', "it is no JSON: prompt stands twice"),
    ('["a"]', 'it is no JSON object, such as {"prompt": "..."}'),
    ('{"seed": 1}', "it has no prompt"),
    ('{"prompt": 3}', "its prompt is 3, which is no text"),
    ('{"prompt": "\\ud800"}', "its prompt has halves of surrogate pairs"),
    (
        '{"prompt": "a", "negative_prompt": "\\ud800"}',
        "its negative_prompt has halves of surrogate",
    ),
    ('{"prompt": "a", "hight": 3}', "it has hight, and a prompt can have: seed, num, "),
    ('{"prompt": "a", "model": "m"}', "it has model, and a prompt can have"),
    ('{"prompt": "a", "seed": "7"}', 'its seed is "7", not a valid integer'),
    ('{"prompt": "a", "seed": 1.5}', "its seed is 1.5, not a valid integer"),
    ('{"prompt": "a", "fps": "film"}', 'its fps is "film", not a valid number'),
    ('{"prompt": "a", "fps": 0.0, "FPS": 1}', "fps stands twice"),
    ('{"prompt": "a", "frames": true}', "its frames is true, not a valid integer"),
]


@pytest.mark.parametrize(("line", "sentence"), JSON_MISTAKES)
def test_bad_json_lines_are_named(lines, tmp_path, line, sentence):
    with pytest.raises(UserError) as caught:
        lines("p.jsonl", f'{{"prompt": "fine"}}\n{line}\n')
    expected = f"1 of 2 prompts of {tmp_path / 'p.jsonl'} is wrong: line 2: {sentence}"
    assert str(caught.value).startswith(expected)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("text,seed\na,1\n", "has no column prompt; its columns are: text, seed"),
        ("", "has no column prompt; its columns are: none"),
        ("prompt,seed,Seed\na,1,2\n", "has two columns seed$"),
        ("prompt,lora\na,b\n", "line 2: it has lora, and a prompt can have: seed, "),
        ("prompt,fps\na,1/0\n", "line 2: --fps 1/0 is no rate; give a number such as 24"),
        ("prompt\n", "has no prompt"),
        ("prompt,seed\na,1,2\n", r"line 2: it has more cells than there are columns: \['2'\]"),
        ("prompt,seed\na,1\nb,one\n", 'line 3: its seed is "one", not a valid integer'),
        ('prompt\n"a\n', "line 2: it is no CSV: "),
    ],
)
def test_bad_csv(lines, content, sentence):
    with pytest.raises(UserError, match=sentence):
        lines("p.csv", content)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(UserError, match=r"no\.csv could not be read: No such file"):
        read_lines(tmp_path / "no.csv")
    for content in (b"\xff\xfe\xfa", "a".encode("utf-16-le"), "é".encode("latin-1")):
        (tmp_path / "p.txt").write_bytes(content)
        with pytest.raises(UserError, match="it is no text in UTF-8"):
            read_lines(tmp_path / "p.txt")
    (tmp_path / "p.json").write_text("[]")
    with pytest.raises(UserError, match=r"p\.json is JSON; write JSON lines"):
        read_lines(tmp_path / "p.json")


def test_all_bad_lines_are_named_as_far_as_there_is_room():
    with pytest.raises(UserError) as caught:
        check_lines(Path("p.txt"), {number: f"no {number}" for number in range(1, 26)}, count=30)
    text = str(caught.value)
    assert text.startswith("25 of 30 prompts of p.txt are wrong: line 1: no 1; line 2: no 2; ")
    assert text.endswith("line 20: no 20; and 5 more")


def test_what_is_wrong_with_every_line_is_not_about_the_lines():
    with pytest.raises(UserError, match=r"^no such profile$"):
        check_lines(Path("p.txt"), {1: "no such profile", 2: "no such profile"}, count=2)
    with pytest.raises(UserError, match=r"^2 of 3 prompts"):
        check_lines(Path("p.txt"), {1: "no such profile", 2: "no such profile"}, count=3)
