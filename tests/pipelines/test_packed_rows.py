"""Where things are in a packed sequence, and what is refused."""

import pytest
import torch

from chipsparse.pipelines.packed_rows import check_noise, read_rows

GRID = (2, 2, 3)
VIDEO = 12
NAMES = ("position_ids", "token_tags", "video_indices", "audio_indices", "text_indices")


def grid_positions(grid, begin=0.0):
    """Time goes on by 5/3, rows and columns by fractions, as in the released model."""
    frame, row, column = torch.meshgrid(*(torch.arange(n) for n in grid), indexing="ij")
    return torch.stack([begin + frame * 5 / 3, row / 7 - 0.1, column / 3 - 0.2], -1).flatten(0, 2)


def packed(order, condition=(1, 2, 3)):
    """A sequence of text (3), a condition (6), audio (2) and the video (12) in this order."""
    parts = {
        "text": (torch.arange(3)[:, None] * torch.tensor([1.0, 0, 0]), 1),
        "condition": (grid_positions(condition, 3.0), 0),
        "audio": (torch.arange(2)[:, None] * torch.tensor([1.0, 0, 0]), 2),
        "video": (grid_positions(GRID, 3.0), 0),
    }
    positions = torch.cat([parts[name][0].double() for name in order])
    tags = torch.cat([torch.full((len(parts[name][0]),), parts[name][1]) for name in order])
    first, places = 0, {}
    for name in order:
        count = len(parts[name][0])
        places[name] = torch.arange(first, first + count)
        first += count
    empty = torch.empty(0, dtype=torch.long)
    video = torch.cat([places.get("condition", empty), places["video"]])
    rows = (positions, tags, video, places.get("audio", empty), places.get("text", empty))
    return dict(zip(NAMES, rows, strict=True)), places


PIPELINES_OWN = ("text", "condition", "audio", "video")


@pytest.mark.parametrize(
    "order",
    [
        PIPELINES_OWN,
        ("text", "audio", "video"),
        ("video", "text"),
        ("video",),
        ("audio", "condition", "text", "video"),
        ("condition", "text", "video", "audio"),
        ("text", "condition", "video", "audio"),
    ],
)
def test_the_last_grid_is_the_video_and_all_else_is_not(order):
    arguments, places = packed(order)
    found = read_rows(**arguments)
    assert found.grid == GRID
    assert torch.equal(found.video, places["video"])
    assert torch.equal(found.conditions, places.get("condition", found.conditions[:0]))
    others = [row for row in range(len(arguments["token_tags"])) if row not in places["video"]]
    assert found.others.tolist() == others


def test_a_picture_in_the_prompt_is_text():
    arguments, _ = packed(PIPELINES_OWN)
    arguments["token_tags"][1] = 0
    assert read_rows(**arguments).grid == GRID


def refusal(order=PIPELINES_OWN, **changes):
    arguments, _ = packed(order)
    with pytest.raises(ValueError, match="row") as raised:
        read_rows(**{**arguments, **changes})
    return str(raised.value)


def test_tags_that_contradict_indices():
    tags = packed(PIPELINES_OWN)[0]["token_tags"]
    for row, tag, sentence in (
        (9, 0, "token_tags and audio_indices contradict each other: row 9 is tagged 0, and "
         "audio_indices names it, whose rows are tagged 2"),
        (2, 2, "token_tags and text_indices contradict each other: row 2 is tagged 2, and "
         "text_indices names it, whose rows are tagged 1 or 0"),
        (15, 1, "token_tags and video_indices contradict each other: row 15 is tagged 1, and "
         "video_indices names it, whose rows are tagged 0"),
    ):  # fmt: skip
        changed = tags.clone()
        changed[row] = tag
        assert refusal(token_tags=changed) == sentence


@pytest.mark.parametrize(
    ("name", "indices", "sentence"),
    [
        ("audio_indices", [9], "sequence once, but name row 10 0 times"),
        ("audio_indices", [9, 10, 9], "sequence once, but name row 9 2 times"),
        ("text_indices", [0, 1, 9], "sequence once, but name row 2 0 times"),
        ("text_indices", [0, 1, 23], "name row 23 of a packed sequence of 23"),
        ("text_indices", [0, 1, -1], "name row -1 of a packed sequence of 23"),
    ],
)
def test_rows_that_are_named_by_no_index_or_by_several(name, indices, sentence):
    assert refusal(**{name: torch.tensor(indices)}).endswith(sentence)


def test_video_rows_that_form_no_grid():
    positions = packed(PIPELINES_OWN)[0]["position_ids"]
    positions[-3:] = positions[-3:].flip(0)
    assert refusal(position_ids=positions) == (
        "the packed rows are in an order that is not known: the video's last 12, from row 11 on, "
        "form no grid of frames, rows and columns by their position_ids; call "
        "chipsparse.disable(pipe) to run the model as it is"
    )


def test_a_sequence_without_video():
    arguments, _ = packed(("text", "video"))
    rest = {name: arguments[name][:3] for name in ("position_ids", "token_tags")}
    rest["video_indices"] = torch.empty(0, dtype=torch.long)
    assert "has no video rows" in refusal(("text", "video"), **rest)


def test_conditions_are_cleaner_than_the_video():
    arguments, places = packed(PIPELINES_OWN)
    rows, timestep = read_rows(**arguments), torch.tensor([0.2, 0.999])
    which = torch.zeros(23, dtype=torch.long)
    which[places["condition"]] = 1
    check_noise(rows, timestep, which)
    check_noise(rows, timestep, which * 0)
    with pytest.raises(ValueError, match=r"at timestep 0\.999, is cleaner than .* at 0\.2,"):
        check_noise(rows, timestep, 1 - which)
