"""The schedules of all bundled profiles, step by step: no change of them goes unnoticed."""

from dataclasses import replace

import pytest

from chipsparse.profiles.profile import ASSETS, QUALITIES_FILE, load_profile
from chipsparse.sparse.plan import SparsityPlan
from tests.chipsparse.sparse.test_plan import LAYOUT
from tests.schedules import letters_of

# Of 28 and of 50 steps. Where a sparse step costs little, and where it costs too much.
GENERAL = {
    "faithful": "ddddd-d--d---d----d----d--d- ddddddddd-d-d--d--d---d----d----d-----d----d--d-d-",
    "balanced": "d-rs-r--s-s-r-s--s--s--r-s-- dd-d-rs-r-s--r-s-s-s--r--s--s--s--r-s--s--s--r-ss-",
    "fast": "d-r-s-r--s--s--s--r----s-s-- d-d-r-s-r--s---r--s--s--s---r--s---s---s---r--s-s-",
    "draft": "d-r---s----r---s---s---s---- d-r-s-r---s----r----s----s----s-----r------s--s---",
    "published": "dddddrsssssssssrsssssssssddd dddddrsssssssssrsssssssssrsssssssssrsssssssssrssdd",
}
SKIPPING = GENERAL | {
    "balanced": "dddd-d--d----d-------d----d- ddddddd-d-d--d---d-----d-------d-------d-----d--d-",
    "fast": "ddd-d----d------------d----- ddddd-d-d--d-----d---------d-----------d-------d--",
    "draft": "dd-d---d------------d------- ddd-d--d----d-----------d------------------d------",
}
OF_IMAGES = {
    "faithful": "dddddd-d-d--d--d---d--d--d-d ddddddddddd-d-d-d--d--d--d---d---d---d---d--d-d-dd",
    "published": "dddrsssssrsssssrsssssrsssssd dddrsssssrsssssrsssssrsssssrsssssrsssssrsssssrsssd",
}
TINY = {
    "published": "dddddddrssssssrssssssssrssss dddddddrssssssrssssssssrsssssssssssrsssssssssssddd",
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
    "published": GENERAL["published"],
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


def letters(config, steps):
    return letters_of(SparsityPlan(config, LAYOUT, steps).actions())


@pytest.mark.parametrize("path", SCHEDULES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_the_schedules_of_bundled_profiles(path):
    mixed, skipping = SCHEDULES[path]
    qualities = load_profile(path).qualities
    assert qualities.keys() == mixed.keys() == skipping.keys()
    for name, config in qualities.items():
        dear = replace(config, schedule=config.schedule.at_cost(None))
        for each, expected in ((config, mixed[name]), (dear, skipping[name])):
            for text in expected.split():
                assert letters(each, len(text)) == text.upper().replace("-", "K")
        assert [SparsityPlan(config, LAYOUT, steps).notes() for steps in (8, 28, 50)] == 3 * [[]]
        eight = letters(config, 8)
        if name != "published" and config.schedule.sparse_steps:
            assert eight == "DRSRSSSS"
        elif name in ("faithful", "balanced"):
            assert eight == "DDDDDDDD"
