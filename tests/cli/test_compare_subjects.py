"""How an argument of `chipsparse compare` is known to be a file or a config."""

from pathlib import Path

import pytest

from chipsparse.cli.compare.subjects import read_subject, read_subjects
from chipsparse.cli.errors import UserError
from chipsparse.profiles.profile import ASSETS, load_profile, profile_classes


@pytest.mark.parametrize(
    ("text", "kind", "path"),
    [
        ("dense", "dense", None),
        ("./dense", "files", Path("dense")),
        ("profile", "config", None),
        ("fast", "config", None),
        ("profile.yaml", "config", Path("profile.yaml")),
        ("tuned/PROFILE.YML", "config", Path("tuned/PROFILE.YML")),
        ("WanTransformer3DModel", "config", ASSETS / "profiles" / "WanTransformer3DModel.yaml"),
        ("frames", "files", Path("frames")),
        ("out.mp4", "files", Path("out.mp4")),
    ],
)
def test_by_its_name_alone(text, kind, path):
    subject = read_subject(text)
    assert (subject.text, subject.kind, subject.path) == (text, kind, path)


def test_a_bundled_profile_is_named_by_its_class():
    assert "FluxTransformer2DModel" in profile_classes()
    for name in profile_classes():
        assert load_profile(read_subject(name).path).model_class == name


def test_a_quality_is_one_of_the_models_own_profile():
    assert [each.quality for each in read_subjects("fast", "published")] == ["fast", "published"]
    assert read_subject("fast").path is None
    assert read_subject("profile").quality is None


def test_a_file_and_a_config_do_not_compare():
    for pair in (("a.mp4", "dense"), ("profile", "frames"), ("a.yaml", "b.png")):
        with pytest.raises(UserError, match=r"is a config and .* is taken for a file"):
            read_subjects(*pair)
    assert [each.kind for each in read_subjects("a.yaml", "dense")] == ["config", "dense"]
