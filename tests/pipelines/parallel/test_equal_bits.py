"""A generation on several processes is that on one, but for roundings, in every family."""

import pytest

from chipsparse.pipelines.registry import FAMILIES as SERVED
from tests.pipelines.parallel.equal_bits import REASONS
from tests.pipelines.test_families import FAMILIES
from tests.ranks import run_ranks

MODULE = "tests.pipelines.parallel.equal_bits"
# Every transformer that several processes can share; see also `REASONS`.
PAIRS = [
    "bria",
    "chrono edit",
    "cogvideox 2b",
    "cogvideox 2b, guided",
    "flux",
    "flux, batch",
    "flux2",
    "hunyuan video",
    "hunyuan video, guided",
    "hunyuan video, odd size",
    "hunyuan video 1.5",
    "kandinsky 5",
    "longcat-image",
    "ltx",
    "ltx, odd size",
    "mochi",
    "mochi, guided",
    "qwen-image",
    "qwen-image, padded and guided",
    "sd3",
    "skyreels v2",
    "wan vace",
    "wan 2.1",
    "wan 2.1, unguided batch",
    "wan 2.2 two experts",
    "wan 2.2 image to video, a timestep per token",
    "skipped, with a forecast",
    "attention alone",
    "caches in e4m3",
    "nothing sparse",
]
# A linear of fewer rows is another kernel of the CPU's library, which may round otherwise: bits are
# equal on some CPUs in all of these, on others in most. What is computed wrongly is off by more.
LARGEST_ROUNDING = 1e-6
WITHOUT_SPARSE_STEPS = ["nothing sparse", "skipped, with a forecast"]


def check(name, results, *, guided=False):
    """Ranks that share guidance branches each take part in the calls of one branch alone."""
    assert all(each["ranks agree"] for each in results), name
    (judged,) = (each for each in results if "difference" in each)
    assert judged["difference"] <= (0 if guided else LARGEST_ROUNDING), (name, judged)
    assert judged["same actions"], (name, judged)
    if guided:
        assert judged["cache share"] < 0.55, (name, judged)
        return judged
    layers = results[0]["layers"]
    assert all(each["layers"] == layers for each in results), name
    assert judged["same layers"], (name, judged)
    assert ("attention sparse" in layers) == (name not in WITHOUT_SPARSE_STEPS), name
    return judged


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """Both ranks of one start, which takes longer than most cases."""
    folder = tmp_path_factory.mktemp("two ranks")
    return run_ranks(2, f"{MODULE}:everything", PAIRS, folder=folder, seconds=900)


@pytest.mark.slow
def test_two_ranks(two_ranks):
    for name in PAIRS:
        judged = check(name, [each.result[name] for each in two_ranks])
        if name in ("wan 2.1", "ltx", "sd3", "flux"):
            assert judged["cache share"] < 0.55, (name, judged)


@pytest.mark.slow
def test_guidance_branches_on_two_ranks(two_ranks):
    for name in two_ranks[0].result["guidance"]:
        check(name, [each.result["guidance"][name] for each in two_ranks], guided=True)
    for each in two_ranks:
        assert "needs a pipeline that guides" in each.result["unguided"]


@pytest.mark.slow
def test_families_whose_tokens_cannot_be_shared_are_refused_with_the_reason(two_ranks):
    for ended in two_ranks:
        found = ended.result["whole"]
        assert found.keys() == REASONS.keys()
        for name, reason in REASONS.items():
            assert f"cannot run on several processes: {reason}" in found[name], (name, found[name])
        assert "with diffusion forcing it repeats timesteps" in ended.result["forced"]


@pytest.mark.slow
def test_every_transformer_is_shared_or_refused():
    sharing = {name for name, family in SERVED.items() if family.sharing.tokens}
    assert transformers_of(PAIRS) == sharing
    assert transformers_of(REASONS) >= SERVED.keys() - sharing


def transformers_of(names):
    made = (FAMILIES[name].make() for name in names if name in FAMILIES)
    return {type(pipe.components["transformer"]).__name__ for pipe in made}


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
    ways = {  # cases, and how many ranks share the guidance branches
        "heads": (["four heads", "joint text, four heads"], 1),
        "heads and branches": (["two experts"], 2),
    }
    ended = run_ranks(4, f"{MODULE}:four", ways, folder=tmp_path, seconds=900)
    for way, (names, guidance) in ways.items():
        for name in names:
            results = [each.result[way][name] for each in ended]
            judged = check(name, results, guided=guidance > 1)
            assert judged["cache share"] < 0.35, (way, name, judged)


@pytest.mark.slow
def test_a_pipeline_that_diffusers_made_parallel(two_ranks):
    for ended in two_ranks:
        for name, found in ended.result["stock"].items():
            assert found["difference"] <= (LARGEST_ROUNDING if name == "compiled" else 0), found
            assert found["sparse"]
            assert found["again the same"]
            assert found["restored"]
        assert ended.result["ring degree"] == (
            "ValueError: this WanTransformer3DModel runs with ring_degree=2, and chipsparse has no "
            "ring; use ulysses_degree"
        )
