"""The scripts that train the bundled models: what they draw, say, read and ask of a model."""

from __future__ import annotations

import argparse
import importlib
import itertools
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLWan
from safetensors import safe_open
from safetensors.torch import save_file

FOLDER = Path(__file__).resolve().parents[1] / "assets" / "training"
MODULES = (
    "captions",
    "common",
    "distill_steps",
    "flow_matching",
    "flux_common",
    "flux_text",
    "export",
    "layout_teacher",
    "mean_weights",
    "scenes",
    "still_captions",
    "still_scenes",
    "text",
    "drawing",
    "train_sizes",
    "train_small_flux_vae",
    "train_wan_encoder",
    "training",
)
COUNT = 200  # examples that a test looks at


@pytest.fixture(scope="module")
def scripts():
    """The modules of `assets/training` by name; afterwards they can no longer be imported."""
    before = set(sys.modules)
    sys.path.insert(0, str(FOLDER))
    try:
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in MODULES})
    finally:
        sys.path.remove(str(FOLDER))
        for name in set(sys.modules) - before:
            if str(getattr(sys.modules[name], "__file__", "")).startswith(str(FOLDER)):
                del sys.modules[name]


@pytest.fixture(params=["clips", "stills"])
def grammar(request, scripts):
    """How either kind of example is sampled and said, and a caption's tokenizers."""
    if request.param == "clips":
        return SimpleNamespace(
            sample=scripts.scenes.sample_scene,
            objects=lambda scene: scene.objects,
            describe=scripts.captions.describe,
            describe_with_owners=scripts.captions.describe_with_owners,
            background=scripts.scenes.MAX_OBJECTS,
            vocabulary=scripts.captions.vocabulary(),
            tokenizers=[(scripts.text.new_tokenizer(), scripts.text.MAX_WORDS)],
        )
    encoders = scripts.flux_text
    return SimpleNamespace(
        sample=scripts.still_scenes.sample_still,
        objects=lambda still: still.things,
        describe=scripts.still_captions.describe_still,
        describe_with_owners=scripts.still_captions.describe_still_with_owners,
        background=scripts.still_scenes.MAX_THINGS,
        vocabulary=scripts.still_captions.still_vocabulary(),
        tokenizers=[
            (encoders.new_tokenizer(for_clip=True), encoders.CLIP_WORDS),
            (encoders.new_tokenizer(for_clip=False), encoders.MAX_WORDS),
        ],
    )


def test_every_word_belongs_to_what_it_is_about(grammar):
    for number in range(COUNT):
        rng = np.random.default_rng(number)
        scene = grammar.sample(rng)
        caption, owners = grammar.describe_with_owners(scene, rng)
        words = caption.replace(",", " ,").split()
        assert len(words) == len(owners), caption
        said = {
            owner: [word for word, of in zip(words, owners, strict=True) if of == owner]
            for owner in set(owners)
        }
        assert scene.background_colour in said[grammar.background], caption
        for i, thing in enumerate(grammar.objects(scene)):
            assert thing.colour in said[i], caption
            assert thing.shape in said[i], caption


def test_a_caption_is_the_same_with_and_without_owners(grammar):
    for number in range(20):
        scene = grammar.sample(np.random.default_rng(number))
        with_owners, _ = grammar.describe_with_owners(scene, np.random.default_rng(number))
        assert grammar.describe(scene, np.random.default_rng(number)) == with_owners


def test_tokenizers_know_every_word_and_keep_whole_captions(grammar):
    for tokenizer, length in grammar.tokenizers:
        ids = tokenizer(" ".join(grammar.vocabulary), add_special_tokens=False).input_ids
        assert len(ids) == len(set(ids)) == len(grammar.vocabulary)
        assert tokenizer.unk_token_id not in ids
        assert tokenizer("zebra", add_special_tokens=False).input_ids == [tokenizer.unk_token_id]
        for number in range(COUNT):
            rng = np.random.default_rng(number)
            caption = grammar.describe(grammar.sample(rng), rng)
            ids = tokenizer(caption).input_ids
            assert len(ids) <= length, caption
            assert ids.count(tokenizer.eos_token_id) == 1
            assert ids[-1] == tokenizer.eos_token_id
            assert tokenizer.unk_token_id not in ids, caption


@pytest.mark.parametrize("kind", ["clips", "stills"])
def test_example_n_of_a_seed_is_always_the_same(scripts, kind):
    load = scripts.common.load_clips if kind == "clips" else scripts.flux_common.load_stills
    first, captions = next(load(seed=5, first=0, batch=6, workers=0))
    assert len(set(captions)) == 6
    later, later_captions = next(load(seed=5, first=4, batch=2, workers=0))
    assert later_captions == captions[4:]
    for name, values in later.items():
        assert torch.equal(values, first[name][4:]), name
    _, others = next(load(seed=6, first=0, batch=6, workers=0))
    assert others != captions


def staged_stills(scripts):
    """`COUNT` stills and the (objects, 4) x, y, angle and radius of their objects."""
    for number in range(COUNT):
        rng = np.random.default_rng(number)
        still = scripts.still_scenes.sample_still(rng)
        staging = scripts.still_scenes.stage_still(still, rng)
        yield still, staging["path"][: len(still.things), 0]


def test_objects_of_a_still_lie_in_the_picture_where_the_caption_says(scripts):
    side = scripts.still_scenes.SIDE
    for still, path in staged_stills(scripts):
        for thing, (x, y, _, radius) in zip(still.things, path, strict=True):
            assert radius <= x <= side - radius, still
            assert radius <= y <= side - radius, still
            place = scripts.still_scenes.PLACES[thing.place]
            if place is None:
                continue
            for at, where in zip(place, (x, y), strict=True):
                third = -1 if where < 0.42 * side else 1 if where > 0.58 * side else 0
                assert third == at, (thing, x, y)


def test_objects_of_a_still_are_apart(scripts):
    for still, path in staged_stills(scripts):
        for a, b in itertools.combinations(path, 2):
            assert np.hypot(*(a - b)[:2]) > 0.95 * (a[3] + b[3]), still


def test_a_still_shows_its_objects_where_they_are_staged(scripts):
    """A solid disc or square has its own colour at its centre, and the pattern around it."""
    look = {"colour": "red", "fill": "solid", "size": "medium"}
    things = (
        scripts.still_scenes.Thing(shape="circle", place="left", **look),
        scripts.still_scenes.Thing(shape="square", place="right", **look),
    )
    still = scripts.still_scenes.Still(things, "plain", "blue")
    staging = scripts.still_scenes.stage_still(still, np.random.default_rng(0))
    batch = {name: torch.as_tensor(value)[None] for name, value in staging.items()}
    image = scripts.still_scenes.draw_still(batch)[0]
    for i in range(2):
        x, y, _, radius = staging["path"][i, 0]
        centre = image[:, int(y), int(x)]
        torch.testing.assert_close(centre, torch.as_tensor(staging["colour"][i, 0]) * 2 - 1)
        outside = image[:, int(y - 1.1 * radius), int(x)]
        ground = torch.as_tensor(staging["ground"]).mean(0) * 2 - 1
        torch.testing.assert_close(outside, ground)


@pytest.mark.parametrize("shape", [(6, 16, 4), (6, 2, 3, 4, 4)])
def test_the_loss_of_a_perfect_prediction_is_zero(scripts, shape):
    latents = torch.randn(shape, generator=torch.Generator().manual_seed(0))

    def velocity(noisy, sigma):
        """(x_t - x_0) / sigma, which is noise - x_0."""
        return (noisy - latents) / sigma.view(-1, *[1] * (latents.ndim - 1))

    torch.manual_seed(0)
    assert scripts.flow_matching.flow_loss(velocity, latents) < 1e-7
    assert scripts.flow_matching.flow_loss(lambda noisy, sigma: noisy, latents) > 0.1


def test_a_full_pool_replaces_its_oldest_examples(scripts):
    def encode(staging, captions):
        return [staging["path"], torch.tensor([int(caption) for caption in captions])]

    pool = scripts.flow_matching.Pool(capacity=4, encode=encode)
    for first in (0, 2, 4):
        numbers = torch.arange(first, first + 2)
        pool.add(
            {"path": numbers.float()[:, None].expand(2, 3)}, [str(n) for n in numbers.tolist()]
        )
    paths, numbers = pool.batch(64)
    assert set(numbers.tolist()) == {2, 3, 4, 5}
    assert torch.equal(paths, numbers.float()[:, None].expand(64, 3))


def test_a_resumed_training_goes_on_as_if_it_had_not_stopped(scripts, tmp_path):
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))

    def trained(*, steps, resume):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4)
        args = SimpleNamespace(
            out=tmp_path, resume=resume, steps=8, seconds=1e9, pause_after=float("inf")
        )
        training = scripts.training.Training(
            model,
            scripts.training.muon_and_adamw(
                [model.weight], list(model.parameters()), lr=0.1, adamw_lr=0.05
            ),
            args,
            warmup=2,
            decay_from=0.5,
            ema=0.9,
            ranks=scripts.common.Ranks(),
        )
        while training.step < steps:
            training.update(model(inputs).square().mean())
        training.save(tmp_path)
        return training

    # so many seconds that progress is the share of steps
    whole = trained(steps=6, resume=False)
    trained(steps=3, resume=False)
    resumed = trained(steps=6, resume=True)
    for a, b in zip(whole.params, resumed.params, strict=True):
        assert torch.equal(a, b)
    for a, b, param in zip(whole.averages, resumed.averages, whole.params, strict=True):
        assert torch.equal(a, b)
        assert not torch.equal(a, param)


@pytest.fixture
def weights_file(tmp_path):
    def write(**weights):
        path = tmp_path / "model.safetensors"
        save_file(weights, path)
        return path

    return write


def test_weights_are_stored_as_the_nearest_in_float16(scripts, weights_file):
    weight = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    file = weights_file(weight=weight, ids=torch.tensor([70_000]))
    scripts.export.store_in_half(file)
    with safe_open(file, "pt") as stored:
        assert stored.metadata() == {"format": "pt"}  # as transformers wants it
        assert torch.equal(stored.get_tensor("weight"), weight.half())
        assert stored.get_tensor("ids").tolist() == [70_000]


def test_a_weight_beyond_float16_is_refused_and_the_file_kept(scripts, weights_file):
    file = weights_file(scale=torch.tensor([1.0, -70_000.0]))
    before = file.read_bytes()
    with pytest.raises(ValueError, match=r"scale .* reaches 70000"):
        scripts.export.store_in_half(file)
    assert file.read_bytes() == before


def test_the_mean_of_two_runs_is_taken_weight_by_weight(scripts):
    first, second = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    found = scripts.mean_weights.mean_weights(first, second.half(), share=0.7)
    expected = 0.7 * first.weight.double() + 0.3 * second.weight.double()
    torch.testing.assert_close(found["weight"].double(), expected, rtol=0, atol=1e-6)
    assert found["bias"].dtype == torch.float32


@pytest.mark.parametrize(
    ("width", "share", "message"),
    [
        (3, 1.5, "share must be from 0 to 1, got 1.5"),
        (4, 0.5, "the two have other names or shapes: weight$"),
    ],
)
def test_a_mean_that_there_is_not_is_refused(scripts, width, share, message):
    with pytest.raises(ValueError, match=message):
        scripts.mean_weights.mean_weights(
            torch.nn.Linear(3, 2), torch.nn.Linear(width, 2), share=share
        )


def test_a_smaller_wan_encoder_leaves_the_decoder_as_it_is(scripts):
    torch.manual_seed(0)
    vae = AutoencoderKLWan(
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[True, True],
        latents_mean=[0.5] * 4,
        latents_std=[2.0] * 4,
        scale_factor_spatial=4,
    )
    small = scripts.train_wan_encoder.with_small_encoder(vae, base_dim=4)
    latents = torch.randn(1, 4, 2, 4, 4)
    assert torch.equal(small.decode(latents).sample, vae.decode(latents).sample)
    assert small.config.latents_std == vae.config.latents_std
    video = torch.rand(1, 3, 5, 16, 16)
    means = [each.encode(video).latent_dist.mean for each in (small, vae)]
    assert means[0].shape == means[1].shape
    parameters = [
        sum(value.numel() for value in each.encoder.parameters()) for each in (small, vae)
    ]
    assert parameters[0] < parameters[1] / 3
    trained = {name for name, value in small.named_parameters() if value.requires_grad}
    assert trained
    assert all(name.startswith("encoder.") for name in trained)


def test_a_smaller_flux_vae_learns_from_the_first_ones_latents_alone(scripts):
    torch.manual_seed(0)
    first, small = (
        scripts.train_small_flux_vae.new_vae(channels=channels)
        for channels in ((16, 16, 24), (8, 16, 16))
    )
    losses = scripts.train_small_flux_vae.losses
    images = torch.rand(2, 3, 16, 16) * 2 - 1
    itself = losses(first, images, first=first)
    assert itself.keys() == scripts.train_small_flux_vae.WEIGHTS.keys()
    assert itself["latents"] == itself["log_variance"] == 0
    assert itself["l1"] > 0.1

    found = losses(small, images, first=first)
    assert found["latents"] > 0.01
    encoder = [*small.encoder.parameters(), *small.quant_conv.parameters()]
    decoder = [*small.decoder.parameters(), *small.post_quant_conv.parameters()]
    drawing = found["l1"] + found["edges"]
    imitating = found["latents"] + found["log_variance"]
    for loss, learns, idle in ((drawing, decoder, encoder), (imitating, encoder, decoder)):
        torch.autograd.grad(loss, learns, retain_graph=True)  # raises where one has no part in it
        unused = torch.autograd.grad(loss, idle, retain_graph=True, allow_unused=True)
        assert set(unused) == {None}


def batch_of_clips(scripts, frames, seed=5):
    """The arrays of three clips, as the loader gives them, and their captions."""
    examples = [
        scripts.common.make_clip(np.random.default_rng([seed, number]), frames=frames)
        for number in range(3)
    ]
    arrays = {
        name: torch.stack([torch.as_tensor(staging[name]) for staging, _ in examples])
        for name in examples[0][0]
    }
    return arrays, [caption for _, caption in examples]


def test_a_larger_canvas_shows_the_same_clip(scripts):
    arrays, _ = batch_of_clips(scripts, frames=3)
    small = scripts.drawing.draw(arrays)
    large = scripts.drawing.draw(scripts.scenes.enlarge(arrays, 256), side=256)
    shrunk = torch.nn.functional.avg_pool3d(large, (1, 2, 2))
    assert shrunk.shape == small.shape
    assert (shrunk - small).abs().mean() < 0.01
    unscaled = scripts.drawing.draw(arrays, side=256)
    assert (torch.nn.functional.avg_pool3d(unscaled, (1, 2, 2)) - small).abs().mean() > 0.03


def test_a_longer_clip_shows_the_same_motion(scripts):
    short, captions = batch_of_clips(scripts, frames=33)
    long, same = batch_of_clips(scripts, frames=65)
    assert captions == same
    assert torch.allclose(long["path"][:, :, ::2], short["path"], atol=1e-3)


def test_canvases_are_read_and_taken_by_weight(scripts):
    read = scripts.train_sizes.Canvas.parse
    small, late = read("128x33:64:1"), read("256x65:8:3:0.5:0.9")
    assert (late.side, late.frames, late.batch, late.weight) == (256, 65, 8, 3.0)
    assert (late.start, late.end, late.seen, late.share_seen) == (0.5, 0.9, None, 1.0)
    assert (small.shift, late.shift) == (3.0, 6.0)
    assert (small.times, late.times, read("384x33:2:1").times) == ((1, 1), (2, 2), (3, 1))
    assert read("384x49:2:1").times is read("64x33:2:1").times is None
    some = read("256x65/8:16:2")
    assert (some.seen, some.latent_frames, some.share_seen) == (8, 17, 8 / 17)
    assert (some.name, some.size) == ("256x65_8", late.size)
    with pytest.raises(argparse.ArgumentTypeError, match="got 256x65"):
        read("256x65")
    with pytest.raises(argparse.ArgumentTypeError, match="has 17 latent ones"):
        read("256x65/18:8:3")

    def taken(progress):
        return [
            scripts.train_sizes.choose([small, late], step=step, progress=progress)
            for step in range(400)
        ]

    assert set(taken(0.4)) == set(taken(0.9)) == {small}
    assert taken(0.6).count(late) / 400 == pytest.approx(0.75, abs=0.06)
    assert taken(0.6) == taken(0.6)  # all processes take the same


def test_layouts_are_taught_by_whole_clips_and_looks_by_parts(scripts):
    """Above the level from which a layout is open lie two thirds of the one, none of the other."""
    read, device = scripts.train_sizes.Canvas.parse, torch.device("cpu")
    small, whole, part = read("128x33:64:1"), read("384x97:2:1"), read("384x97/8:8:1")
    long = read("128x97:8:1")
    assert small.layout_from == pytest.approx(1 / 1.3)
    assert whole.layout_from == part.layout_from == pytest.approx(0.945, abs=1e-3)
    torch.manual_seed(0)
    above = (long.levels(6_000, device) > long.layout_from).float().mean().item()
    assert above == pytest.approx(2 / 3 + 0.6 / 3, abs=0.05)
    torch.manual_seed(0)
    found = {canvas: canvas.levels(6_000, device) for canvas in (small, whole, part)}
    assert {len(levels) for levels in found.values()} == {6_000}
    assert found[part].max() < part.layout_from
    usual = scripts.flow_matching.sample_sigma(6_000, device, shift=9.0)
    open_of = {name: (levels > 0.945).float().mean().item() for name, levels in found.items()}
    share = (usual > 0.945).float().mean().item()
    assert open_of[whole] == pytest.approx(2 / 3 + share / 3, abs=0.03)
    torch.manual_seed(0)
    assert torch.equal(scripts.flow_matching.sample_sigma(6_000, device), found[small])


TIMES = [(1, 1), (2, 2), (3, 1), (3, 3)]  # a clip as large as the teacher's, in space and time


@pytest.mark.parametrize("times", TIMES)
def test_a_small_clips_noise_is_part_of_the_larger_ones(scripts, times):
    space, time = times
    torch.manual_seed(0)
    noise = torch.randn(400, 4, 1 + 2 * time, 4 * space, 4 * space)
    shown, deviation = scripts.layout_teacher.noise_within(noise, times)
    assert deviation == pytest.approx(0.9 / (space**2 * time) ** 0.5)
    squares = noise.unflatten(3, (4, space)).unflatten(5, (4, space)).mean((4, 6))
    first, later = squares[:, :, :1], squares[:, :, 1:].unflatten(2, (2, time)).mean(3)
    rest = torch.cat([first, later], dim=2) - shown
    assert rest.shape == (400, 4, 3, 4, 4)
    for frame in range(3):
        inside, outside = shown[:, :, frame], rest[:, :, frame]
        assert inside.std().item() == pytest.approx(deviation, rel=0.02)
        assert (inside * outside).mean().abs() < 0.02 * deviation**2 + 2e-4


@pytest.mark.parametrize("times", TIMES)
def test_layouts_to_be_expected_keep_their_mean_and_vary_less(scripts, times):
    """Each clip of one number; a teacher that knows what to expect of it."""
    space, time = times
    torch.manual_seed(0)
    count, shape = 40_000, (1, 1 + time, space, space)
    clean = torch.randn(count, 1, 1, 1, 1)
    sigma = torch.full((count,), 0.9)
    noise = torch.randn(count, *shape)

    def velocity(noisy, level, ids):
        kept, deviation = 1 - level[0], level[0] / 2**0.5  # of the mean of two frames
        found = noisy.mean((1, 2, 3, 4), keepdim=True) * kept / (kept**2 + deviation**2)
        return (noisy - found) / level[0]

    teacher = scripts.layout_teacher.LayoutTeacher(velocity)
    small = clean.expand(count, 1, 2, 1, 1)
    expected = teacher.expected(clean.expand(count, *shape), small, None, noise, sigma)
    moved = (expected - clean).flatten(1)
    assert torch.allclose(moved, moved[:, :1].expand_as(moved), atol=1e-5)
    moved, seen = moved[:, 0], (0.1 * clean + 0.9 * noise.mean((1, 2, 3, 4), True)).flatten()
    assert moved.mean().abs() < 0.02
    assert torch.corrcoef(torch.stack([moved, seen]))[0, 1].abs() < 0.05
    assert expected.var() < 0.5 * clean.var()


@pytest.mark.parametrize("times", TIMES)
def test_a_teacher_that_sees_through_the_noise_moves_nothing(scripts, times):
    space, time = times
    torch.manual_seed(0)
    small = torch.randn(2, 3, 3, 4, 4)
    latents = torch.randn(2, 3, 1 + 2 * time, 4 * space, 4 * space)

    def velocity(noisy, level, ids):
        assert ids == "text"
        return (noisy - small) / level.view(-1, 1, 1, 1, 1)

    teacher = scripts.layout_teacher.LayoutTeacher(velocity)
    sigma, noise = torch.tensor([0.3, 1.0]), torch.randn(latents.shape)
    expected = teacher.expected(latents, small, "text", noise, sigma)
    assert torch.allclose(expected, latents, atol=1e-5)


@pytest.mark.parametrize("form", ["64x5:2:1", "128x33:2:1", "256x65:2:1", "256x65/8:2:1"])
def test_teachers_are_asked_about_whole_clips_of_their_sizes(scripts, form):
    module = scripts.train_sizes
    canvas = module.Canvas.parse(form)
    config = SimpleNamespace(pad_token_id=0, eos_token_id=1)

    class Still(torch.nn.Module):
        text_encoder = SimpleNamespace(config=config)
        transformer = SimpleNamespace(rope=torch.nn.Identity())

        def forward(self, noisy, sigma, ids, *, text_length):
            return torch.zeros_like(noisy)

    asked = []

    def expected(latents, small, ids, noise, sigma):
        asked.append(small)
        return noise  # a velocity of zero, as the model's

    training = SimpleNamespace(model=Still(), step=0)
    latents = torch.randn(2, 8, canvas.latent_frames, 4, 4)
    small = [torch.zeros(2, 8, 9, 2, 2)] if canvas.side == 256 else []
    loss_of = module.FlowLoss(training, module.Canvas.parse("128x33:2:1"), Still())
    loss_of.teacher = SimpleNamespace(expected=expected)
    whole = canvas.times is not None and canvas.seen is None
    for step in (0, 15):  # the first canvas shows single frames at the second
        training.step, before = step, len(asked)
        loss, _ = loss_of(canvas, latents.clone(), torch.ones(2, 40, dtype=torch.int64), *small)
        single = step == 15 and canvas == loss_of.first
        assert (loss.item() == 0.0) == (len(asked) > before) == (whole and not single)
    for rows in asked:
        assert torch.equal(rows, small[0] if small else latents)


@pytest.mark.parametrize("gap", [("0", "0.4"), ("0.5", "1")])
def test_some_canvas_has_to_be_there_at_all_times(scripts, monkeypatch, capsys, gap):
    first, last = gap
    canvases = ["--canvas", "128x33:8:1:0:0.5", "--canvas", f"64x33:8:1:{first}:{last}"]
    options = ["train_sizes.py", "--start", "a", "--out", "b", *canvases]
    monkeypatch.setattr("sys.argv", options)
    parser = scripts.train_sizes.new_parser("Trains.", lr=1e-3)
    if gap == ("0.5", "1"):
        assert len(scripts.train_sizes.parse_arguments(parser).canvas) == 2
        return
    with pytest.raises(SystemExit):
        scripts.train_sizes.parse_arguments(parser)
    assert "none of them is there from 0.5 of the training on" in capsys.readouterr().err


def test_some_frames_keep_their_places_in_the_clip(scripts):
    model = scripts.train_sizes.Denoiser(scripts.text.new_tokenizer())
    rope = model.transformer.rope
    canvas = scripts.train_sizes.Canvas.parse("64x33/4:2:1")
    latents = torch.zeros(2, 8, canvas.latent_frames, 4, 6)
    whole = [each.unflatten(1, (canvas.latent_frames, -1)) for each in rope(latents)]
    torch.manual_seed(0)
    seen = set()
    for _ in range(20):
        with scripts.train_sizes.some_frames(model, canvas) as frames:
            assert len(frames) == 4
            assert (frames.diff() > 0).all()
            for found, expected in zip(rope(latents[:, :, frames]), whole, strict=True):
                assert torch.equal(found, expected[:, frames].flatten(1, 2))
        seen.add(bool((frames.diff() == 1).all()))
        assert torch.equal(rope(latents)[0], whole[0].flatten(1, 2))
    assert seen == {True, False}  # runs, and any
    with scripts.train_sizes.some_frames(model, canvas.parse("64x33:2:1")) as frames:
        assert frames is None


def test_a_larger_shift_moves_half_of_the_noise_levels(scripts):
    torch.manual_seed(0)
    levels = scripts.flow_matching.sample_sigma(20_000, torch.device("cpu"), shift=9.0)
    base = scripts.flow_matching.sample_sigma(20_000, torch.device("cpu"))
    assert levels.mean() > base.mean() + 0.03
    assert levels.quantile(0.1) == pytest.approx(base.quantile(0.1).item(), abs=0.1)


class Straight(torch.nn.Module):
    """A denoiser whose velocity is a number: the mean of the tokens, times the noise level."""

    def forward(self, noisy, sigma, ids, *, text_length):
        assert text_length == 64
        level = sigma * ids.float().mean(dim=1)
        return level.view(-1, 1, 1, 1, 1).expand(noisy.shape)


@pytest.mark.parametrize("rollout", [0.0, 1.0])
def test_a_student_is_to_go_where_its_guided_teacher_goes(scripts, rollout):
    module = scripts.distill_steps
    student = Straight()
    training = SimpleNamespace(model=student, ranks=SimpleNamespace(device=torch.device("cpu")))
    start = FOLDER.parent / "tiny-wan"
    options = {"count": 4, "rollout": rollout, "compile_": False}
    loss = module.StepLoss(training, Straight(), start, substeps=2, guidance=3.0, **options)
    assert len(loss.levels) == 5
    assert (loss.levels[0], loss.levels[-1]) == (1.0, 0.0)
    ids = scripts.text.tokenize(loss.tokenizer, ["a red circle over a blue gradient"] * 2)
    with_text = ids[0].float().mean().item()
    empty = scripts.text.tokenize(loss.tokenizer, [""]).float().mean().item()
    latents = torch.zeros(2, 8, 1, 2, 2)
    torch.manual_seed(0)
    step = int(torch.randint(4, ()))
    level, end = loss.levels[step : step + 2]
    guided = empty + 3.0 * (with_text - empty)
    middle = (level + end) / 2
    # Of two equal substeps, each with the velocity of where it begins.
    target = guided * (level + middle) / 2
    torch.manual_seed(0)
    found, counts = loss(None, latents, ids)
    assert counts
    assert found.item() == pytest.approx((target - with_text * level) ** 2, rel=1e-3)
    began = torch.zeros(2, 8, 1, 2, 2)
    moved = sum(b * (a - b) for b, a in itertools.pairwise(loss.levels[:3]))
    assert torch.allclose(
        loss._by_student(began, ids, 2), torch.full_like(began, with_text * moved)
    )
