"""Profiles: found by folder and class, complete, and refused with the field's path."""

import os
import re

import pytest

from chipsparse.config import Action, Listed, Periodic, ScheduleConfig, SparsityConfig, Spread
from chipsparse.profiles import profile as profiles
from chipsparse.profiles.profile import QUALITIES, default_profile, find_profile, load_profile
from chipsparse.profiles.published import published_psnr
from chipsparse.skip.timetable import Run, resolve

PROFILES = sorted((profiles.ASSETS / "profiles").glob("*.yaml"))
TINY = [profiles.ASSETS / name / "chipsparse.yaml" for name in ("tiny-wan", "tiny-flux")]


@pytest.mark.parametrize("path", [*PROFILES, *TINY], ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_bundled_profiles_have_every_quality(path):
    profile = load_profile(path)
    assert path in TINY or profile.model_class == path.stem
    assert profile.description
    assert tuple(profile.qualities) == tuple(QUALITIES)
    assert (profile.quality, profile.sparsity) == ("balanced", profile.qualities["balanced"])
    for name in ("balanced", "fast") if "3D" in path.stem else ():
        attention = profile.qualities[name].attention
        schedule = profile.qualities[name].schedule
        assert (attention.density, attention.delta_rule) == (0.1, "block_means")
        assert (schedule.correct, schedule.forecast) == (True, 0.5)
    assert path not in TINY or not profile.qualities["fast"].mlp.is_sparse
    assert profile.qualities["chipmunk"].mlp.is_sparse
    assert isinstance(profile.qualities["chipmunk"].schedule.form, Periodic | Listed)
    for config in profile.qualities.values():
        assert config.tile == profile.sparsity.tile


def test_where_profiles_come_from(tmp_path):
    general = default_profile()
    assert general.is_general
    assert tuple(general.qualities) == tuple(QUALITIES)
    assert general.serves("NoTransformer2DModel")
    relative = load_profile(os.path.relpath(profiles.QUALITIES_FILE.resolve()))
    assert relative.is_general
    assert relative.qualities == general.qualities
    with pytest.raises(
        ValueError,
        match=r"class UNet; the command chipsparse models lists the 30 ",
    ):
        find_profile(None, "UNet")
    by_class = find_profile(tmp_path, "WanTransformer3DModel")
    assert by_class.source.endswith("WanTransformer3DModel.yaml")
    of_two = find_profile(None, "WanTransformer3DModel", experts=2)
    assert of_two.source.endswith("two-experts/WanTransformer3DModel.yaml")
    for quality in QUALITIES:
        form = of_two.of_quality(quality).sparsity.schedule.form
        assert Action.SKIP not in resolve(form, Run(50)).actions()
    assert find_profile(None, "FluxTransformer2DModel", experts=2).model_class.startswith("Flux")
    (tmp_path / "chipsparse.yaml").write_text(
        "model_class: WanTransformer3DModel\n"
        "generation: {height: 64, num_inference_steps: 7}\n"
        "sparsity: {tile: null, mlp: {density: 0.5}}\n",
    )
    own = find_profile(tmp_path, "WanTransformer3DModel")
    assert own.source == str(tmp_path / "chipsparse.yaml")
    assert own.generation == profiles.GenerationDefaults(height=64, num_inference_steps=7)
    assert own.sparsity == SparsityConfig().override({"tile": None, "mlp.density": 0.5})


QUALITY_TEXT = """
sparsity: {tile: null, attention: {precision: fp8}, schedule: {spread: {full: 0.5}}}
qualities: {balanced: , fast: {attention: {density: 0.07}, schedule: {periodic: {warmup: 3}}}}
"""


@pytest.fixture
def mine(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(QUALITY_TEXT)
    return load_profile(path)


def test_a_quality_lies_over_the_common_part_and_that_over_what_its_name_stands_for(mine):
    general = default_profile().qualities
    assert mine.quality == "balanced"
    common = {"tile": None, "attention.precision": "fp8"}
    schedule = {"schedule": ScheduleConfig(Spread(0.5))}  # taken whole
    assert mine.sparsity == general["balanced"].override({**common, **schedule})
    own = {"attention.density": 0.07, "schedule": ScheduleConfig(Periodic(3))}
    fast = mine.of_quality("fast")
    assert fast.sparsity == general["fast"].override({**common, **own})
    assert (fast.quality, fast.qualities) == ("fast", mine.qualities)
    assert fast.of_quality("balanced") == mine
    changed = mine.override({"memory.vram": "1G"})  # in all qualities
    assert changed.of_quality("fast").sparsity == fast.sparsity.override({"memory.vram": "1G"})
    assert (changed.sparsity.memory.vram, mine.sparsity.memory.vram) == (1 << 30, None)
    assert mine.qualities["draft"] == general["draft"].override({**common, **schedule})


def test_a_profile_has_all_qualities_or_none(mine, tmp_path):
    known = "known are faithful, balanced, fast, draft, chipmunk"
    with pytest.raises(ValueError, match=f"there is no quality 'best'; {known}"):
        mine.of_quality("best")
    path = tmp_path / "plain.yaml"
    path.write_text("medium: image\nqualities: {}")
    of_images = find_profile(None, "FluxTransformer2DModel").qualities
    assert load_profile(path).qualities == of_images != default_profile().qualities
    path.write_text("sparsity: {tile: null}")
    profile = load_profile(path)
    assert (profile.quality, profile.sparsity) == (None, SparsityConfig(tile=None))
    with pytest.raises(ValueError, match=r"what fast is: it has no qualities"):
        profile.of_quality("fast")


NO_TEXT = "cannot read the profile (it is no text in UTF-8)"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "cannot read the profile (No such file or directory)"),
        ("pipe", "cannot read the profile (it is a pipe or device; give a file)"),
        (b"\x00\xe8\xff", NO_TEXT),
        ("tile: null".encode("utf-16-le"), NO_TEXT),
        (b"\xff\xfes", NO_TEXT),
        ("#" * ((1 << 20) + 1), "cannot read the profile (it has more than 1,048,576 bytes)"),
        ("sparsity: {attention: {keep: 1}}", "sparsity.attention.keep: unknown field; allowed: "),
        ("generation: {height: tall}", "generation.height: expected a whole number, got 'tall'"),
        ("qualities: 3", "qualities: expected a mapping, got 3"),
        ("qualities: {best: {}}", "qualities.best: unknown quality; allowed: faithful, balanced"),
        ("qualities: {fast: 0.2}", "qualities.fast: expected a mapping as under sparsity, got 0.2"),
        ("qualities: {fast: {mlp: {density: -1}}}", "qualities.fast.mlp.density: expected"),
        ("tuned: {target: {psnr: 3}}", "tuned.target.psnr: unknown field"),
        ("[1, 2]", "the top level: expected a mapping"),
        ("a: [", "not valid YAML"),
        ("a: 1\na: {}", "not valid YAML (a stands twice, in line 2, column 1)"),
        (f"sparsity: {'[' * 3000}{']' * 3000}", "not valid YAML (nested too deeply)"),
        ("x: &a {<<: *a}", "not valid YAML (an alias; write its fields out, in line 1, column 12)"),
        (f"sparsity: {{tile: {'9' * 5000}}}", "not valid YAML (Exceeds the limit"),
        ("description: 2024-99-99", "not valid YAML (month must be"),
        ("generation: {num_inference_steps: 1001}", "between 1 and 1000, got 1001"),
    ],
)
def test_bad_profiles_are_refused_by_path(tmp_path, content, problem):
    path = tmp_path / "bad.yaml"
    if content == "pipe":
        os.mkfifo(path)
    elif content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))}: .*{re.escape(problem)}"):
        load_profile(path)


@pytest.mark.parametrize("coding", ["utf-8-sig", "utf-16"])
def test_marks_of_byte_order_and_other_ends_of_lines(tmp_path, coding):
    path = tmp_path / "mine.yaml"
    path.write_bytes("description: für\rsparsity:\r\n  tile: null\n".encode(coding))
    profile = load_profile(path)
    assert (profile.description, profile.sparsity) == ("für", SparsityConfig(tile=None))
    path.write_text("")  # every field may be left out
    nothing = load_profile(path)
    assert (nothing.sparsity, nothing.serves("any")) == (SparsityConfig(), True)
    assert not find_profile(None, "FluxTransformer2DModel").serves("WanTransformer3DModel")


@pytest.mark.parametrize(
    ("model", "speedup", "experts", "text"),
    [
        ("HunyuanVideoTransformer3DModel", 2.4, 1, "28-34 dB at 2x"),
        ("HunyuanVideoTransformer3DModel", 2.5, 1, "24-27 dB at 3x"),
        ("HunyuanVideoTransformer3DModel", 9.0, 1, "21-23 dB at 4.5x"),
        ("WanTransformer3DModel", 3.0, 2, "24-26 dB at 1.7x"),
        ("QwenImageTransformer2DModel", 1.0, 1, "36 dB at 1.4x"),
        ("MochiTransformer3DModel", 3.6, 2, "21-27 dB at 3x"),
    ],
)
def test_the_nearest_published_range(model, speedup, experts, text):
    assert str(published_psnr(model, speedup, experts=experts)) == text
