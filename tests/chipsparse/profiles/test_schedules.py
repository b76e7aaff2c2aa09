"""The schedules of all bundled profiles, step by step: no change of them goes unnoticed."""

import pytest

from chipsparse.plan import SparsityPlan
from chipsparse.profiles.profile import ASSETS, QUALITIES_FILES, load_profile
from tests.chipsparse.test_plan import LAYOUT
from tests.schedules import letters_of

GENERAL = {
    "faithful": "ddddd-d--d---d----d----d--d- ddddddddd-d-d--d--d---d----d----d-----d----d--d-d-",
    "balanced": "drsrs-r-ss-rs-s-s-r--s-s-rs- drsrsrs-r-ss-r-s-s-s--r--s--s--s--r-s--s--ss-r-ss-",
    "fast": "drsr-s-r--s-s-r-s--s-s--r-s- d-rs-rs-s--r--s--s--s--r---s-s--s---s-s--r-s-s-ss-",
    "draft": "d-d--r--s---r----s--s--r-s-- d-r-s-r---s----r----s----s----s-----r------s--s---",
    "published": "dddddrsssssssssrsssssssssddd dddddrsssssssssrsssssssssrsssssssssrsssssssssrssdd",
}
IMAGES = {
    "faithful": "dddddd-d-d--d--d---d--d--d-d ddddddddddd-d-d-d--d--d--d---d---d---d---d--d-d-dd",
    "balanced": "ddddd-d--d----d------d----d- dddddddd-d-d--d---d----d-----d-----d-----d---d--d-",
    "fast": "dddd-d---d-------d-------d-- ddddd-d-d--d-----d---------d-----------d-------d--",
    "draft": "dd-d---d------------d------- ddd-d--d----d-----------d------------------d------",
    "published": "dddrsssssrsssssrsssssrsssssd dddrsssssrsssssrsssssrsssssrsssssrsssssrsssssrsssd",
}
SHORT_CLIPS = GENERAL | {
    "balanced": "dddd-d---d-------d-------d-- dddddd-d-d--d----d------d---------d--------d----d-",
    "fast": "ddd-d----d------------d----- dddd-d-d---d------d------------d-------------d----",
    "draft": "dd-d---d------------d------- ddd-d--d-------d---------------------d------------",
}
TINY_WAN = GENERAL | {
    "published": "dddddddrssssssrssssssssrssss dddddddrssssssrssssssssrsssssssssssrsssssssssssddd"
}
TINY_FLUX = {**IMAGES, "published": TINY_WAN["published"]}
TINY_FLUX["balanced"] = (
    "dddd-d---d-------d-------d-- dddddd-d-d--d---d-----d------d-------d------d---d-"
)
OF_IMAGES = "Bria|BriaFibo2|Chroma|Flux|Flux2|Flux3|HiDreamImage|LongCatImage|OvisImage"
OF_IMAGES += "|QwenImage|QwenImage21|SD3|ZImage"
SCHEDULES = {
    ASSETS / "tiny-wan/chipsparse.yaml": TINY_WAN,
    ASSETS / "tiny-flux/chipsparse.yaml": TINY_FLUX,
    QUALITIES_FILES["video"]: GENERAL,
    QUALITIES_FILES["image"]: IMAGES,
    **dict.fromkeys(ASSETS.glob("profiles/*.yaml"), GENERAL),
    **{ASSETS / f"profiles/{name}Transformer2DModel.yaml": IMAGES for name in OF_IMAGES.split("|")},
    **{
        ASSETS / f"profiles/{name}Transformer3DModel.yaml": SHORT_CLIPS
        for name in ("Helios", "LTXVideo", "LTX2Video")
    },
}


@pytest.mark.parametrize("path", SCHEDULES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_the_schedules_of_bundled_profiles(path):
    qualities = load_profile(path).qualities
    assert qualities.keys() == SCHEDULES[path].keys()
    for name, config in qualities.items():
        for expected in SCHEDULES[path][name].split():
            plan = SparsityPlan(config, LAYOUT, len(expected))
            assert letters_of(plan.actions()) == expected.upper().replace("-", "K")
            assert plan.notes() == []
        few = SparsityPlan(config, LAYOUT, 8)
        if name != "published" and config.schedule.sparse_steps:
            assert letters_of(few.actions()) == "DRSRSSSS"
        elif name in ("faithful", "balanced"):
            assert letters_of(few.actions()) == "DDDDDDDD"
        assert few.notes() == []
