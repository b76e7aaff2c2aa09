"""What a tuned profile records, and when a generation is another one."""

import dataclasses

import pytest

from chipsparse.profiles.profile import load_profile
from chipsparse.profiles.tuned_range import TunedFor, TunedTarget, digest, outside, target_text

CALL = {"height": 256, "width": 256, "num_inference_steps": 50, "guidance_scale": 4.0}
MODEL = {"model": "tiny", "transformer_config": "abc"}
TUNED = TunedFor(**MODEL, **CALL, dtype="float32", device="NVIDIA H200")


@pytest.mark.parametrize(
    ("change", "phrase"),
    [
        ({"transformer_config": "xyz"}, "another model than tiny"),
        ({"height": 512}, "a height of 512 pixels, not 256"),
        ({"num_frames": 9}, "9 frames, not none"),
        ({"num_inference_steps": 30}, "30 steps, not 50"),
        ({"guidance_scale": None}, "guidance none, not 4.0"),
        ({"flow_shift": 6.0}, "a flow shift of 6.0, not the scheduler's own"),
        ({"dtype": "bfloat16"}, "bfloat16, not float32"),
        ({"device": "NVIDIA A100"}, "NVIDIA A100, not NVIDIA H200"),
    ],
)
def test_each_difference_is_named(change, phrase):
    same = dataclasses.asdict(TUNED)
    assert outside(TUNED, same) == outside(TUNED, {}) == []
    assert outside(TUNED, {**same, **change}) == [phrase]
    shifted = dataclasses.replace(TUNED, flow_shift=6.0)
    assert outside(shifted, same) == ["a flow shift of the scheduler's own, not 6.0"]


def test_a_digest_is_of_the_model_not_of_what_wrote_it():
    config = {"num_layers": 3, "_diffusers_version": "0.42.1"}
    assert digest(config) == digest({"_diffusers_version": "0.43.0", "num_layers": 3})
    assert digest(config) != digest({"num_layers": 4})


@pytest.mark.parametrize(
    ("model_class", "source"),
    [("WanTransformer3DModel", "WanTransformer3DModel.yaml"), ("''", "assets/qualities.yaml")],
)
def test_a_profile_for_50_steps_is_not_used_for_4(tmp_path, model_class, source):
    path = tmp_path / "mine.yaml"
    path.write_text(
        f"model_class: {model_class}\n"
        "generation: {num_inference_steps: 50, height: 480}\n"
        "tuned: {model: mine, num_inference_steps: 50, target: {min_psnr_db: 30}}\n"
        "sparsity: {schedule: {listed: {full: [0, 20]}}}\n",
    )
    profile = load_profile(path)
    target = TunedTarget(min_psnr_db=30.0)
    assert profile.tuned == TunedFor(model="mine", num_inference_steps=50, target=target)
    assert target_text(vars(target)) == "a PSNR of at least 30 dB"
    for steps in (None, 25, 50, 80):
        assert profile.for_steps(steps) is profile
    of_two = profile.for_steps(4, experts=2).source
    assert ("two-experts" in of_two) == model_class.startswith("Wan")
    other = profile.for_steps(4)
    assert other.source.endswith(source)
    assert (other.quality, other.tuned, other.generation) == ("balanced", None, profile.generation)
    said = f"{path} was tuned for 50 steps and is not used for 4: balanced"
    assert other.instead.startswith(said)
    assert dataclasses.replace(profile, tuned=None).for_steps(4).instead is None
