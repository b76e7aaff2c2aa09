"""`--image`: how the picture is read and sized, and which pipelines take one."""

import json
import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusers import FluxImg2ImgPipeline, WanImageToVideoPipeline
from PIL import Image

from chipsparse.cli.errors import UserError
from chipsparse.cli.generation.input_image import fitted, read_image, size_like
from chipsparse.cli.media.read import read_clip
from tests.pipelines.families.wan import image_to_video
from tests.tiny_models import PROMPT, tiny_flux_pipeline

WAN_PROFILE = """\
model_class: WanTransformer3DModel
generation:
  {height: 32, width: 48, num_frames: 5, num_inference_steps: 4, max_sequence_length: 16}
sparsity:
  schedule: {warmup_steps: 2, refresh_every: 10}
"""
FLUX_PROFILE = """\
model_class: FluxTransformer2DModel
generation: {height: 32, width: 48, num_inference_steps: 5, max_sequence_length: 16}
sparsity:
  schedule: {warmup_steps: 2, refresh_every: 10}
  tile: [1, 4, 4]
"""


def picture(width=48, height=32):
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels)


def save(pipe, profile, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    pipe.save_pretrained(folder)
    (folder / "chipsparse.yaml").write_text(profile)
    return folder


@pytest.fixture(scope="module")
def wan_folder(tmp_path_factory):
    pipe = image_to_video(expand_timesteps=True)
    return save(pipe, WAN_PROFILE, tmp_path_factory)


@pytest.fixture(scope="module")
def flux_folder(tmp_path_factory):
    return save(tiny_flux_pipeline(), FLUX_PROFILE, tmp_path_factory)


@pytest.fixture
def ftfy(monkeypatch):
    """Cleans nothing; the Wan pipeline wants the package."""
    from diffusers.pipelines.wan import pipeline_wan_i2v

    fake = SimpleNamespace(fix_text=lambda text: text)
    monkeypatch.setattr(pipeline_wan_i2v, "ftfy", fake, raising=False)


# Reading and sizing.


def test_pictures_are_upright_and_opaque(tmp_path):
    turned = Image.new("RGB", (40, 20), "red")
    exif = Image.Exif()
    exif[0x0112] = 6  # a camera that was held upright
    turned.save(tmp_path / "turned.jpg", exif=exif)
    assert read_image(tmp_path / "turned.jpg").size == (20, 40)
    Image.new("RGBA", (4, 4), (255, 0, 0, 0)).save(tmp_path / "clear.png")
    assert read_image(tmp_path / "clear.png").getpixel((0, 0)) == (255, 255, 255)
    Image.new("L", (4, 4), 7).save(tmp_path / "grey.png")
    assert read_image(tmp_path / "grey.png").getpixel((0, 0)) == (7, 7, 7)


# Red at the left, blue at the right; in files that say so in other ways, and what is seen there.
RED, BLUE, WHITE = (255, 0, 0), (0, 0, 255), (255, 255, 255)
TURNS = {1: (RED, BLUE), 2: (BLUE, RED), 3: (BLUE, RED), 6: (RED, BLUE), 8: (BLUE, RED)}


@pytest.mark.parametrize("read", [read_image, lambda path: read_clip(path).frames[0]])
def test_every_reader_shows_what_a_viewer_does(tmp_path, read, recwarn):
    left = Image.new("RGB", (12, 8), RED)
    left.paste(BLUE, (6, 0, 12, 8))
    first, path = left.quantize(4), tmp_path / "a.png"
    seen = {"red": {"transparency": first.getpixel((0, 0))}}
    seen["half"] = {
        "transparency": bytes(255 - 127 * (i == first.getpixel((0, 0))) for i in range(4))
    }
    half = (255, 127, 127)
    for image, words, expected in (
        (first, seen["red"], (WHITE, BLUE)),
        (first, seen["half"], (half, BLUE)),
        (left, {"transparency": RED}, (WHITE, BLUE)),
        (left.convert("P"), {}, (RED, BLUE)),
        (Image.new("LA", (12, 8), (100, 128)), {}, ((177,) * 3, (177,) * 3)),
        (Image.new("1", (12, 8), 1), {}, (WHITE, WHITE)),
    ):
        image.save(path, **words)
        pixels = np.asarray(read(path))
        assert (tuple(pixels[1, 1]), tuple(pixels[-2, -2])) == expected
    for turn, expected in TURNS.items():
        exif = Image.Exif()
        exif[0x0112] = turn
        left.save(path, exif=exif)
        pixels = np.asarray(read(path))
        assert pixels.shape == ((12, 8, 3) if turn > 4 else (8, 12, 3))
        assert (tuple(pixels[1, 1]), tuple(pixels[-2, -2])) == expected
    assert recwarn.list == []


def test_cmyk_is_printed_the_right_way_round(tmp_path):
    for name in ("a.jpg", "a.tif"):
        Image.new("RGB", (8, 8), RED).convert("CMYK").save(tmp_path / name)
        assert np.abs(np.asarray(read_image(tmp_path / name)) - np.int64(RED)).max() <= 3


SIXTEEN = np.array([[0, 128, 129], [32639, 65406, 65407], [65535, 257, 514]], np.uint16)
EIGHT = [[0, 0, 1], [127, 254, 255], [255, 1, 2]]


@pytest.mark.parametrize("name", ["a.png", "a.tif", "a.pgm"])
def test_sixteen_bits_become_eight(tmp_path, name):
    Image.fromarray(SIXTEEN).save(tmp_path / name)
    found = read_image(tmp_path / name)
    assert found.mode == "RGB"
    assert np.asarray(found).tolist() == [[[value] * 3 for value in row] for row in EIGHT]


def test_sixteen_bits_of_other_byte_order_and_turned(tmp_path):
    turned = Image.Exif()
    turned[0x0112] = 6
    Image.fromarray(SIXTEEN).save(tmp_path / "a.png", exif=turned)
    swapped = Image.frombytes("I;16B", (3, 3), SIXTEEN.astype(">u2").tobytes())
    swapped.save(tmp_path / "a.tif")
    found = [np.asarray(read_image(tmp_path / name))[..., 0] for name in ("a.tif", "a.png")]
    assert found[0].tolist() == EIGHT
    assert found[1].tolist() == np.rot90(EIGHT, -1).tolist()


@pytest.mark.parametrize(("kind", "mode"), [(np.int32, "I"), (np.float32, "F")])
def test_more_bits_are_refused(tmp_path, kind, mode):
    Image.fromarray(SIXTEEN.astype(kind)).save(tmp_path / "a.tif")
    sentence = rf"--image .*a\.tif does not have 8 bits per channel \(its mode: {mode}\)$"
    with pytest.raises(UserError, match=sentence):
        read_image(tmp_path / "a.tif")


def test_what_is_no_picture(tmp_path, monkeypatch):
    (tmp_path / "a.png").write_text("text")
    with pytest.raises(UserError, match=r"--image .*a\.png is no image that can be read"):
        read_image(tmp_path / "a.png")
    with pytest.raises(UserError, match="does not exist"):
        read_image(tmp_path / "b.png")
    with pytest.raises(UserError, match="is a folder; name a file"):
        read_image(tmp_path)
    os.mkfifo(tmp_path / "pipe.png")
    with pytest.raises(UserError, match=r"pipe\.png is no regular file"):
        read_image(tmp_path / "pipe.png")
    picture().save(tmp_path / "large.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    with pytest.raises(UserError, match=r"large\.png is no image that can be read"):
        read_image(tmp_path / "large.png")


@pytest.mark.parametrize(
    ("shape", "asked", "expected"),
    [
        ((96, 64), (None, None), (256, 384)),  # as many pixels as usual, 3:2
        ((64, 96), (None, None), (384, 256)),
        ((1000, 10), (None, None), (32, 3136)),
        ((96, 64), (128, None), (128, 192)),
        ((96, 64), (None, 96), (64, 96)),
        ((96, 64), (80, 80), (80, 80)),
    ],
)
def test_the_size_has_the_shape_of_the_picture(shape, asked, expected):
    found = size_like(Image.new("RGB", shape), asked=asked, usual=(320, 307), multiples=(16, 32))
    assert found == expected


def test_what_does_not_fit_is_cut_alike_on_both_sides():
    image = Image.new("RGB", (90, 30), "red")
    image.paste("blue", (30, 0, 60, 30))
    square = fitted(image, (30, 30))
    assert square.size == (30, 30)
    assert np.asarray(square)[:, 1:-1, 2].min() == 255


# Pipelines.


def test_image_to_video(generate, wan_folder, workdir, ftfy):
    picture(96, 64).save("in.png")
    content = generate(
        "-o", "out.png", "--image", "in.png", "--json", "--seed", "3", model=wan_folder
    ).json()
    assert content["image"] == "in.png"
    assert (content["sparse"]["frames"], content["sparse"]["height"]) == (5, 32)
    actions = [step["action"] for step in content["sparse"]["steps"]]
    assert actions == ["dense", "refresh", "sparse", "sparse"]
    generate(
        "-o", "dense.png", "--image", "in.png", "--dense", "--seed", "3", model=wan_folder
    ).fine()
    pipe = WanImageToVideoPipeline.from_pretrained(wan_folder)
    pipe.set_progress_bar_config(disable=True)
    frames = pipe(
        image=fitted(picture(96, 64), (32, 48)),
        prompt=PROMPT,
        height=32,
        width=48,
        num_frames=5,
        num_inference_steps=4,
        max_sequence_length=16,
        generator=torch.Generator("cpu").manual_seed(3),
    ).frames[0]
    written = np.stack([np.asarray(Image.open(f"dense-00{i}.png")) for i in range(5)])
    np.testing.assert_array_equal(written, np.rint(frames * 255).astype(np.uint8))


def test_an_image_model_becomes_its_image_to_image_pipeline(generate, flux_folder, workdir):
    picture().save("in.png")
    given = ("--image", "in.png", "--strength", "0.6", "--json")
    content = generate("-o", "out.png", *given, "--dense", model=flux_folder).json()
    assert content["pipeline_class"] == "FluxImg2ImgPipeline"
    assert content["strength"] == 0.6
    assert len(content["dense"]["steps"]) == 3  # of 5, the last ones
    pipe = tiny_flux_pipeline(FluxImg2ImgPipeline)
    (expected,) = pipe(
        PROMPT,
        image=picture(),
        strength=0.6,
        height=32,
        width=48,
        num_inference_steps=5,
        max_sequence_length=16,
        generator=torch.Generator().manual_seed(0),
        output_type="np",
    ).images
    written = np.asarray(Image.open("out.png"))
    np.testing.assert_array_equal(written, np.rint(expected * 255).astype(np.uint8))


def test_the_steps_behind_the_first_ones_are_known(generate, flux_folder, workdir):
    picture().save("in.png")
    given = ("--image", "in.png", "--strength", "0.6", "--json")
    ran = generate("-o", "out.png", *given, model=flux_folder).fine()
    steps = json.loads(ran.stdout)["sparse"]["steps"]
    assert [step["action"] for step in steps] == ["dense", "refresh", "sparse"]
    assert [step["step"] for step in steps] == [0, 1, 2]
    assert steps[2]["attention_kept"] < 1
    assert "step 3 of 3 (sparse)" in ran.stderr


def test_too_few_of_the_steps_are_left_to_be_sparse(generate, flux_folder, workdir):
    picture().save("in.png")
    given = ("-o", "out.png", "--image", "in.png", "--strict")
    error = generate(*given, "--strength", "0.4", model=flux_folder).refused()
    assert "the profile's schedule computes all 2 steps in full; it takes --steps 6" in error


@pytest.mark.parametrize(
    ("model", "arguments", "sentence"),
    [
        ("wan_folder", (), "WanImageToVideoPipeline starts from an image; give one with --image"),
        (
            "wan_folder",
            ("--image", "in.png", "--strength", "0.5"),
            "WanImageToVideoPipeline has no strength; leave --strength out",
        ),
        ("model_folder", ("--image", "in.png"), "WanPipeline takes no image; leave --image out"),
        ("flux_folder", ("--image", "in.png", "--strength", "2"), "--strength 2 must be above 0"),
    ],
)
def test_what_is_refused_before_loading(
    generate, workdir, loads_nothing, request, model, arguments, sentence
):
    picture().save("in.png")
    error = generate("-o", "out.png", *arguments, model=request.getfixturevalue(model)).refused()
    assert error.startswith(f"chipsparse: error: {sentence}")
    assert [path.name for path in workdir.iterdir()] == ["in.png"]


def test_a_package_that_a_pipeline_wants(generate, wan_folder, workdir):
    picture().save("in.png")
    ran = generate("-o", "out.png", "--image", "in.png", model=wan_folder)
    if ran.exit_code:  # where ftfy is not installed
        assert ran.exit_code == 2
        assert ran.stderr.splitlines()[-1] == (
            "chipsparse: error: WanImageToVideoPipeline needs the Python package ftfy; install it "
            "with pip install ftfy"
        )
