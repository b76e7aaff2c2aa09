"""A generation on several processes is that on one, bit for bit, in every family."""

import pytest

from tests.ranks import run_ranks

MODULE = "tests.pipelines.parallel.equal_bits"
# Every transformer that several processes can share; the others are refused (`test_refusals`).
PAIRS = [
    "cogvideox 2b",
    "cogvideox 2b, guided",
    "flux",
    "flux, batch",
    "flux2",
    "hunyuan video",
    "hunyuan video 1.5",
    "hunyuan video 1.5, odd size",
    "ltx",
    "ltx, odd size",
    "mochi",
    "qwen-image",
    "qwen-image, padded and guided",
    "sd3",
    "wan 2.1",
    "wan 2.1, odd size",
    "wan 2.1, unguided batch",
    "wan 2.2 two experts",
    "wan 2.2 image to video, a timestep per token",
    "one head's columns at a time",
    "skipped by a threshold, with a forecast",
    "forecast of the error",
    "attention alone",
    "nothing sparse",
]
# Where rows of a linear are no multiple of 16, a CPU rounds the last ones otherwise.
ROUNDED = ["hunyuan video, odd size", "hunyuan video, guided", "mochi, guided"]
LARGEST_ROUNDING = 1e-6
WITHOUT_SPARSE_STEPS = ["nothing sparse", "skipped by a threshold, with a forecast"]


def check(name, results, *, largest=0.0):
    assert all(each["ranks agree"] for each in results), name
    layers = results[0]["layers"]
    assert all(each["layers"] == layers for each in results), name
    (judged,) = (each for each in results if "difference" in each)
    assert judged["difference"] <= largest, (name, judged)
    assert judged["same actions"], name
    assert judged["same layers"], (name, judged)
    if name in WITHOUT_SPARSE_STEPS:
        assert "attention sparse" not in layers
    else:
        assert layers["attention sparse"] > 0, name
    return judged


def check_guided(name, results):
    """As `check`; each rank takes part in the calls of one branch alone."""
    assert all(each["ranks agree"] for each in results), name
    (judged,) = (each for each in results if "difference" in each)
    assert judged["difference"] == 0, (name, judged)
    assert judged["same actions"], (name, judged)
    assert judged["cache share"] < 0.55, (name, judged)
    return judged


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """Both ranks of one start, which takes longer than most cases."""
    folder = tmp_path_factory.mktemp("two ranks")
    return run_ranks(2, f"{MODULE}:everything", PAIRS + ROUNDED, folder=folder, seconds=900)


@pytest.mark.slow
def test_two_ranks(two_ranks):
    for name in PAIRS + ROUNDED:
        largest = LARGEST_ROUNDING if name in ROUNDED else 0.0
        judged = check(name, [each.result[name] for each in two_ranks], largest=largest)
        if name in ("wan 2.1", "ltx", "sd3", "flux"):
            assert judged["cache share"] < 0.55, (name, judged)


@pytest.mark.slow
def test_guidance_branches_on_two_ranks(two_ranks):
    for name in two_ranks[0].result["guidance"]:
        check_guided(name, [each.result["guidance"][name] for each in two_ranks])
    for each in two_ranks:
        assert "needs a pipeline that guides" in each.result["unguided"]


@pytest.mark.slow
def test_two_ranks_share_query_rows(two_ranks):
    for name in two_ranks[0].result["ring"]:
        judged = check(name, [each.result["ring"][name] for each in two_ranks])
        if name in ("ltx, odd size", "one head", "forecast of the error"):
            assert judged["cache share"] < 0.55, (name, judged)


@pytest.mark.slow
def test_three_ranks(tmp_path):
    names = ["four heads", "uneven heads", "joint text, four heads", "two experts"]
    ended = run_ranks(3, f"{MODULE}:together", names, folder=tmp_path, seconds=900)
    for name in names:
        judged = check(name, [each.result[name] for each in ended])
        # They share four heads as 2, 1 and 1, and five as 2, 2 and 1.
        assert judged["cache share"] <= 0.55, (name, judged)


@pytest.mark.slow
def test_four_ranks(tmp_path):
    ways = {  # cases, how many ranks share the guidance branches, and how many query rows
        "heads": (["joint text, four heads"], 1, 1),
        "heads and rows": (["four heads", "joint text, four heads"], 1, 2),
        "rows": (["one head"], 1, 4),
        "heads and branches": (["two experts"], 2, 1),
        "rows and branches": (["one head"], 2, 2),
    }
    ended = run_ranks(4, f"{MODULE}:four", ways, folder=tmp_path, seconds=900)
    for way, (names, guidance, _) in ways.items():
        for name in names:
            results = [each.result[way][name] for each in ended]
            judged = (check if guidance == 1 else check_guided)(name, results)
            assert judged["cache share"] < 0.35, (way, name, judged)


@pytest.mark.slow
def test_a_pipeline_that_diffusers_made_parallel(two_ranks):
    for ended in two_ranks:
        for name, found in ended.result["stock"].items():
            assert found["difference"] <= (LARGEST_ROUNDING if name == "compiled" else 0), found
            # For CPUs diffusers has no ring attention. It says so before and after.
            assert found["stock"] == "runs" or (name == "ring" and "return_lse" in found["stock"])
            assert found["sparse"]
            assert found["again the same"]
            assert found["restored"]
