"""The schedules of all bundled profiles, step by step: no change of them goes unnoticed."""

import pytest

from chipsparse.profiles.profile import ASSETS, QUALITIES_FILE, load_profile
from chipsparse.skip.why import may_be_sparse
from chipsparse.sparse.plan import SparsityPlan
from chipsparse.sparse.plan_notes import plan_notes
from tests.chipsparse.sparse.test_plan import LAYOUT
from tests.schedules import letters_of

# Of 28 and of 50 steps. Where a sparse step costs little, and where it costs too much.
GENERAL = {
    "faithful": "ddddd-d--d---d----d----d--d- ddddddddd-d-d--d--d---d----d----d-----d----d--d-d-",
    "balanced": "d-rs-r--s-s-r-s--s--s--r-s-- dd-d-rs-r-s--r-s-s-s--r--s--s--s--r-s--s--s--r-ss-",
    "fast": "d-r-s-r--s--s--s--r----s-s-- d-d-r-s-r--s---r--s--s--s---r--s---s---s---r--s-s-",
    "draft": "d-r---s----r---s---s---s---- d-r-s-r---s----r----s----s----s-----r------s--s---",
    "chipmunk": "dddddrsssssssssrsssssssssddd dddddrsssssssssrsssssssssrsssssssssrsssssssssrssdd",
}
SKIPPING = GENERAL | {
    "balanced": "dddd-d--d----d-------d----d- ddddddd-d-d--d---d-----d-------d-------d-----d--d-",
    "fast": "ddd-d----d------------d----- ddddd-d-d--d-----d---------d-----------d-------d--",
    "draft": "dd-d---d------------d------- ddd-d--d----d-----------d------------------d------",
}
OF_IMAGES = {
    "faithful": "dddddd-d-d--d--d---d--d--d-d ddddddddddd-d-d-d--d--d--d---d---d---d---d--d-d-dd",
    "chipmunk": "dddrsssssrsssssrsssssrsssssd dddrsssssrsssssrsssssrsssssrsssssrsssssrsssssrsssd",
}
TINY = {
    "chipmunk": "dddddddrssssssrssssssssrssss dddddddrssssssrssssssssrsssssssssssrsssssssssssddd",
}
TINY_FLUX = OF_IMAGES | TINY
TINY_FLUX["balanced"] = (
    "dddd-d---d-------d-------d-- dddddd-d-d--d---d-----d------d-------d------d---d-"
)
TWO_EXPERTS = {
    "faithful": "dddddrsrsrsrssrssrssrssrsrsd dddddddddrsrsrsrsrsrsrssrssrssrssrssrssrssrsrsrsdd",
    "balanced": "dddrsrssrsssrssssrssssrsssrs ddddrsrsrsrssrssrsssrssssrssssrsssssrssssrsssrssrs",
    "fast": "drsrsssrssssssrsssssssssrsss ddrsrsrssrssssrssssssrssssssssrsssssssssrssssssrss",
    "draft": "ddrssssssssrssssssssssssssss ddrsssrssssssssrssssssssssssssssssssrsssssssssssss",
    "chipmunk": GENERAL["chipmunk"],
}
IMAGES = "Bria|BriaFibo2|Chroma|Flux|Flux2|Flux3|HiDreamImage|LongCatImage|OvisImage|QwenImage"
IMAGES += "|QwenImage21|SD3|ZImage"
VIDEO = GENERAL, SKIPPING
IMAGE = GENERAL | OF_IMAGES, SKIPPING | OF_IMAGES
SCHEDULES = {
    ASSETS / "tiny-wan/chipsparse.yaml": (GENERAL | TINY, GENERAL | TINY),
    ASSETS / "tiny-flux/chipsparse.yaml": (GENERAL | TINY_FLUX, SKIPPING | TINY_FLUX),
    QUALITIES_FILE: VIDEO,
    **dict.fromkeys(ASSETS.glob("profiles/*.yaml"), VIDEO),
    **{ASSETS / f"profiles/{name}Transformer2DModel.yaml": IMAGE for name in IMAGES.split("|")},
    ASSETS / "profiles/two-experts/WanTransformer3DModel.yaml": (TWO_EXPERTS, TWO_EXPERTS),
}


def letters(config, steps, sparse_cost=0.0):
    plan = SparsityPlan(config, LAYOUT, steps, sparse_cost=sparse_cost)
    return letters_of(plan.actions())


@pytest.mark.parametrize("path", SCHEDULES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_the_schedules_of_bundled_profiles(path):
    mixed, skipping = SCHEDULES[path]
    qualities = load_profile(path).qualities
    assert qualities.keys() == mixed.keys() == skipping.keys()
    for name, config in qualities.items():
        for cost, expected in ((0.0, mixed[name]), (None, skipping[name])):
            for text in expected.split():
                assert letters(config, len(text), cost) == text.upper().replace("-", "K")
        assert [
            plan_notes(SparsityPlan(config, LAYOUT, steps), base=config) for steps in (8, 28, 50)
        ] == 3 * [[]]
        eight = letters(config, 8)
        if name != "chipmunk" and may_be_sparse(config.schedule.form, 0.0):
            assert eight == "DRSRSSSS"
        elif name in ("faithful", "balanced"):
            assert eight == "DDDDDDDD"
