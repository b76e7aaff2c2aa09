"""Settings of other model families, from their classes alone."""

import dataclasses

import diffusers
import pytest

from chipsparse.cli import settings
from chipsparse.cli.errors import UserError
from chipsparse.cli.model import description as models
from chipsparse.cli.options import GenerationOptions
from chipsparse.config import SparsityConfig
from chipsparse.profiles.profile import GenerationDefaults, Profile


def options(**given):
    return GenerationOptions(**given)


def description(pipeline, transformer_config, vae_config):
    return models.ModelDescription(
        location="",
        pipeline_class=getattr(diffusers, pipeline),
        transformer_class="",
        transformer_config=transformer_config,
        vae_config=vae_config,
    )


@pytest.fixture
def flux():
    vae = {"block_out_channels": [128, 256, 512, 512]}
    return description("FluxPipeline", {"patch_size": 1}, vae)


@pytest.fixture
def hunyuan():
    vae = {"spatial_compression_ratio": 8, "temporal_compression_ratio": 4}
    transformer = {"patch_size": 2, "patch_size_t": 1}
    return description("HunyuanVideoPipeline", transformer, vae)


def test_option_then_profile_then_pipeline(hunyuan):
    resolved = settings.resolve_settings(
        options(height=64), hunyuan, GenerationDefaults(height=96, width=128)
    )
    assert (resolved.height, resolved.width, resolved.num_frames) == (64, 128, 129)
    assert resolved.num_inference_steps == 50


def test_an_image_pipeline_gets_no_frames(flux):
    resolved = settings.resolve_settings(options(), flux, GenerationDefaults(num_frames=9))
    assert "num_frames" not in resolved.call_arguments()
    assert resolved.height is None  # the pipeline decides
    with pytest.raises(UserError, match="FluxPipeline has no num_frames; leave --frames out"):
        settings.resolve_settings(options(frames=9), flux, GenerationDefaults())


def test_guidance_of_a_model_that_takes_no_scale(flux):
    scaled = dataclasses.replace(flux, transformer_config={"guidance_embeds": True})
    free = dataclasses.replace(flux, transformer_config={"guidance_embeds": False})
    defaults = GenerationDefaults(true_cfg_scale=4.0)
    for model, scale, expected in [
        (scaled, None, (3.5, 4.0)),
        (scaled, 2.0, (2.0, 4.0)),
        (free, None, (3.5, 4.0)),
        (free, 2.0, (3.5, 2.0)),
    ]:
        found = settings.resolve_settings(options(guidance_scale=scale), model, defaults)
        assert (found.guidance_scale, found.true_cfg_scale) == expected
    nothing = GenerationDefaults()
    with pytest.raises(UserError, match=r"no effect .* set generation\.true_cfg_scale"):
        settings.resolve_settings(options(negative_prompt="fog"), scaled, nothing)
    with pytest.raises(UserError, match=r"no effect .* raise --guidance-scale"):
        settings.resolve_settings(options(negative_prompt="fog"), free, nothing)
    settings.resolve_settings(options(negative_prompt="fog"), scaled, defaults)


def test_a_negative_prompt_needs_guidance_of_any_model():
    wan = description("WanPipeline", {}, {})
    wan = dataclasses.replace(wan, transformer_class="WanTransformer3DModel")
    given = {"negative_prompt": "fog", "guidance_scale": 1.0}
    with pytest.raises(UserError, match=r"no effect without .*; raise --guidance-scale"):
        settings.resolve_settings(options(**given), wan, GenerationDefaults())
    assert settings.resolve_settings(
        options(**given | {"guidance_scale": 1.5}), wan, GenerationDefaults()
    )


def test_settings_of_a_profile_that_the_pipeline_does_not_have(flux):
    used = GenerationDefaults(height=64, true_cfg_scale=4.0)
    profile = Profile("", "", used, SparsityConfig(), "a.yaml")
    assert settings.unused_defaults(flux, profile) == []
    more = dataclasses.replace(profile, generation=dataclasses.replace(used, num_frames=9))
    assert settings.unused_defaults(flux, more) == [
        "a.yaml: FluxPipeline has no use for generation.num_frames (9)"
    ]


def test_a_scale_of_zero_is_no_guidance(flux):
    off = GenerationDefaults(true_cfg_scale=0.0)
    with pytest.raises(UserError, match="--negative-prompt has no effect"):
        settings.resolve_settings(options(negative_prompt="fog"), flux, off)


def test_packed_latents_count_twice(flux):
    packed = dataclasses.replace(
        flux,
        transformer_config={"patch_size": 1, "in_channels": 64},
        vae_config={"latent_channels": 16, "block_out_channels": [1] * 5},
    )
    with pytest.raises(UserError, match=r"--width 48 .* multiple of 32; use 32 or 64"):
        settings.resolve_settings(options(width=48), packed, GenerationDefaults())
    plain = dataclasses.replace(packed, transformer_config={"patch_size": 1, "in_channels": 16})
    settings.resolve_settings(options(width=48), plain, GenerationDefaults())


def test_sizes_of_other_families(flux, hunyuan):
    for model in (flux, hunyuan):
        with pytest.raises(UserError, match=r"--width 100 .* multiple of 16; use 96 or 112"):
            settings.resolve_settings(options(width=100), model, GenerationDefaults())
    with pytest.raises(UserError, match=r"--frames 2 .* multiple of 4 plus 1; use 1 or 5"):
        settings.resolve_settings(options(frames=2), hunyuan, GenerationDefaults())


@pytest.mark.parametrize(
    ("config", "factors"),
    [
        ({"scale_factor_spatial": 16, "scale_factor_temporal": 4}, (16, 4)),
        ({"temperal_downsample": [False, True, True]}, (8, 4)),
        ({"spatial_compression_ratio": 32, "temporal_compression_ratio": 8}, (32, 8)),
        (
            {"spatio_temporal_scaling": [True] * 3 + [False], "patch_size": 4, "patch_size_t": 1},
            (32, 8),
        ),
        ({"block_out_channels": [1, 2, 3, 4]}, (8, 1)),
        ({"spatial_expansions": [2, 2, 2], "temporal_expansions": [1, 2, 3]}, (8, 6)),
        ({}, (1, 1)),
    ],
)
def test_vae_factors(config, factors):
    assert settings.vae_factors(config) == factors


@pytest.mark.parametrize(
    ("config", "patch"),
    [
        ({"patch_size": [1, 2, 2]}, (1, 2, 2)),
        ({"patch_size": 2, "patch_size_t": 1}, (1, 2, 2)),
        ({"patch_size": [2, 4]}, (1, 2, 4)),
        ({}, (1, 1, 1)),
    ],
)
def test_patch_sizes(config, patch):
    assert settings.patch_sizes(config) == patch
