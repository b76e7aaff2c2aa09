"""What was measured of a class, as commands and pages say it."""

import yaml

from chipsparse.pipelines.registry import ADAPTERS
from chipsparse.profiles import measured
from chipsparse.profiles.measured import MEASURED_FILE, Measured, measured_of
from chipsparse.profiles.profile import QUALITIES


def test_the_file_names_classes_and_qualities_that_are_there():
    facts = yaml.safe_load(MEASURED_FILE.read_text())
    assert set(facts) <= set(ADAPTERS)
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
