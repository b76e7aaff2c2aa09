"""What was measured of a class, as commands and pages say it."""

import yaml

from chipsparse.pipelines.registry import FAMILIES
from chipsparse.profiles import measured
from chipsparse.profiles.measured import MEASURED_FILE, Measured, measured_of, measured_with
from chipsparse.profiles.profile import (
    QUALITIES,
    bundled_model,
    default_profile,
    find_profile,
    load_profile,
)


def test_the_file_names_classes_and_qualities_that_are_there():
    facts = yaml.safe_load(MEASURED_FILE.read_text())
    assert set(facts) <= set(FAMILIES)
    for name in facts:
        for qualities in measured_of(name).speed.values():
            assert qualities
            assert set(qualities) <= set(QUALITIES)


def test_what_it_says_in_words():
    nothing = measured_of("SomeTransformer")
    assert (nothing.speed_text, nothing.quality_text) == ("nothing", "nothing")
    some = Measured({"A 720p": ("fast", "draft"), "B": ("faithful",)}, quality=True)
    assert some.runs == "fast, draft (A 720p); faithful (B)"
    assert some.speed_text == f"{some.runs}: one H200, random weights"
    assert some.quality_text == (
        "a model of 53 M parameters that was trained for it, no full-size weights"
    )


def test_a_class_is_read_from_the_file(tmp_path, monkeypatch):
    path = tmp_path / "measured.yaml"
    path.write_text("A: {speed: {A at 480p: [fast]}}\nB: {quality: true}\n")
    monkeypatch.setattr(measured, "MEASURED_FILE", path)
    assert measured_of("A") == Measured({"A at 480p": ("fast",)})
    assert measured_of("B") == Measured({}, quality=True)


def test_nothing_was_measured_with_other_profiles_or_two_experts(tmp_path):
    name = "WanTransformer3DModel"
    shipped = find_profile(None, name)
    mine = tmp_path / f"{name}.yaml"
    mine.write_text(f"model_class: {name}\nqualities: {{}}\n")
    assert measured_with(shipped) == measured_with(shipped.of_quality("fast")) == measured_of(name)
    assert measured_of(name).quality
    others = [
        find_profile(None, name, experts=2),
        find_profile(bundled_model(), name),
        load_profile(mine),
        default_profile(),
    ]
    assert [measured_with(other) for other in others] == [Measured()] * len(others)
    assert measured_with(shipped, experts=2) == Measured()
