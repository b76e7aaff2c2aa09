"""The duties of every adapter, on tiny pipelines of all model families.

A module in ``families/`` adds the families that it lists in ``FAMILIES``.
"""

import functools
import importlib
import inspect
import itertools
from pathlib import Path

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from diffusers import DiffusionPipeline, ModularPipeline
from diffusers.models.attention_dispatch import attention_backend

import chipsparse
from chipsparse import SparsityConfig
from chipsparse.config import PARTS
from chipsparse.kernels.mask_packing import unpack_mask
from chipsparse.pipelines.model_sizes import frame_chunks, vae_factors
from chipsparse.pipelines.patches import stock_class
from chipsparse.sparse.cache.store import CacheStore
from tests import variants
from tests.pipelines import small_sparse
from tests.pipelines.model_state import calls_of, state_of
from tests.pipelines.small_sparse import EXACT, STEPS
from tests.schedules import listed
from tests.variants import slow


def collected():
    """The families of all modules beside `family`, by name."""
    modules = sorted(file.stem for file in (Path(__file__).parent / "families").glob("*.py"))
    found = {}
    for module in modules:
        imported = importlib.import_module(f"tests.pipelines.families.{module}")
        for family in getattr(imported, "FAMILIES", []):
            assert family.name not in found
            found[family.name] = family
    return found


FAMILIES = collected()
BASE = ""  # the call as the family gives it
CALLS = [(name, variant) for name in FAMILIES for variant in (BASE, *FAMILIES[name].variants)]
# The fast tests make all calls of these in full, and a short one of the others.
WHOLE = {"flux", "wan 2.2 two experts"}
# One for every way in which transformers differ: text in the same sequence or not, single blocks,
# two experts, packed rows. What does not depend on the pipeline around it is tested with these, and
# with the others in slow tests.
MODELS = {*WHOLE, "hunyuan video", "minimax h3", "mochi", "qwen-image", "wan 2.1"}
assert FAMILIES.keys() >= MODELS
SPARSE = small_sparse.SPARSE.override(listed("DRSKRSSRSSRSSRSS"))
IN_FULL = [name for name in FAMILIES if not FAMILIES[name].brief]


def slow_unless(quick, families=IN_FULL):
    return pytest.mark.parametrize("name", variants.slow_unless(quick, families))


each_model = slow_unless(MODELS)


def variants_of(name):
    return (BASE, *FAMILIES[name].variants)


def arguments_of(name, variant):
    family = FAMILIES[name]
    return {**family.call, **(family.variants[variant] if variant else {})}


def generate(
    pipe,
    name,
    variant=BASE,
    *,
    steps=STEPS,
    place=lambda _field, value: value,
    **changes,  # of the call's arguments
):
    """The latents of one call, whose arguments, by field, are put in their place."""
    torch.manual_seed(0)  # for pipelines that encode an image without their generator
    results = pipe(
        **{field: place(field, value) for field, value in arguments_of(name, variant).items()},
        **changes,
        num_inference_steps=steps,
        generator=torch.Generator().manual_seed(0),
        output_type="latent",
        return_dict=False,
    )
    return FAMILIES[name].result(results)


def transformers_of(pipe):
    models = (pipe.transformer, getattr(pipe, "transformer_2", None))
    return [model for model in models if model is not None]


@functools.cache
def unpatched(name):
    return FAMILIES[name].make()


@functools.cache
def dense(name, variant=BASE, steps=STEPS):
    return generate(unpatched(name), name, variant, steps=steps)


@functools.cache
def sparse(name):
    pipe = FAMILIES[name].make()
    with chipsparse.enable(pipe, SPARSE):
        return generate(pipe, name)


def as_batch(output):
    return torch.stack(output) if isinstance(output, list) else output


def assert_close(found, expected, tolerance=1e-4):
    """Equal but for the rounding of another order of summation; lists stand for batches."""
    small_sparse.assert_close(as_batch(found), as_batch(expected), tolerance)


def assert_expected(report, family, variant=BASE):
    """That the report says what the family announces of a call, and nothing else."""
    masked = [family.masked[variant]] if variant in family.masked else []
    for sentence in report.fallbacks:
        assert any(part in sentence for part in (*family.fallbacks, *masked)), sentence
    for part in (*family.fallbacks, *masked):
        assert any(part in sentence for sentence in (*report.fallbacks, *report.notes)), part


def dense_parts(family, variant):
    return {*family.dense_parts, *(["attention"] if variant in family.masked else [])}


@slow_unless({*WHOLE, "mochi", "qwen-image"}, FAMILIES)
def test_an_all_dense_plan_is_bit_equal_to_the_unpatched_pipeline(name):
    pipe = FAMILIES[name].make()
    for config in (SparsityConfig.dense(), SPARSE.override({"schedule.actions": ["dense"]})):
        for variant in (BASE, *FAMILIES[name].masked):
            with chipsparse.enable(pipe, config) as handle:
                assert torch.equal(generate(pipe, name, variant), dense(name, variant))
            assert set(handle.report.actions()) == {"dense"}
            assert handle.report.cache_bytes == 0
            assert handle.report.fallbacks == []


@slow_unless({"flux", "ltx-2", "qwen-image", "wan 2.1"})
def test_all_guidance_branches_are_known_at_the_first_one(name, monkeypatch):
    """So that memory is shared out evenly: guidance multiplies what differs between branches."""
    admitted = {}
    admit = CacheStore.admit

    def noting(store, branch, plan, device, demand):
        admitted.setdefault(store, []).append((branch, demand.branches))
        admit(store, branch, plan, device, demand)

    monkeypatch.setattr(CacheStore, "admit", noting)
    pipe = FAMILIES[name].make()
    if not isinstance(pipe, DiffusionPipeline | ModularPipeline):
        pytest.skip("a loop of the tests, which says nothing beforehand")
    for variant in variants_of(name):
        with chipsparse.enable(pipe, SPARSE):
            generate(pipe, name, variant)
        assert admitted, variant
        for found in admitted.values():
            assert found[0][1] == len({branch for branch, _ in found}), (variant, found)
        admitted.clear()


def test_a_masked_call_differs_from_one_without_the_mask():
    """Or the tests of all calls would show nothing: what a mask hides is large."""
    for name in ("cogvideox 2b", "hunyuan video", "mochi"):
        for variant in FAMILIES[name].masked:
            assert not torch.allclose(dense(name, variant), dense(name), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize(
    ("name", "calls"),
    [
        *((name, variants_of(name)) for name in sorted(WHOLE)),
        ("qwen-image", ["padded", *FAMILIES["qwen-image"].masked]),
        ("hunyuan video", ["short prompt", *FAMILIES["hunyuan video"].masked]),
        ("hunyuan video 1.5", ["glyphs", *FAMILIES["hunyuan video 1.5"].masked]),
        ("mochi", ["guided batch", *FAMILIES["mochi"].masked]),
        ("cogvideox 2b", [*FAMILIES["cogvideox 2b"].masked]),
        ("flux2 klein that keeps keys", [BASE, "two references"]),
        ("flux kontext", [BASE]),
        ("flux controlnet", [BASE]),
        *(slow(name, variants_of(name)) for name in FAMILIES if name not in WHOLE),
    ],
)
def test_keeping_everything_is_the_dense_result_of_every_call(name, calls):
    family = FAMILIES[name]
    pipe = FAMILIES[name].make()
    for variant, rule in zip(calls, itertools.cycle(["block_means", "difference"]), strict=False):
        with chipsparse.enable(pipe, EXACT.override({"attention.delta_rule": rule})) as handle:
            found = generate(pipe, name, variant)
        assert_expected(handle.report, family, variant)
        assert_close(found, dense(name, variant))
        kept = {(r.attention_kept, r.mlp_kept) for r in handle.report.steps if r.action == "sparse"}
        without = dense_parts(family, variant)
        assert kept == {tuple(None if part in without else 1.0 for part in PARTS)}, variant


# The second one of two experts takes longer.
@slow_unless(FAMILIES, [name for name in IN_FULL if "two experts" not in name])
def test_three_steps_that_keep_everything_are_the_dense_ones(name):
    """And their sizes are those that the configs tell."""
    family = FAMILIES[name]
    pipe = FAMILIES[name].make()
    steps = 3 + family.unpatched_steps
    with chipsparse.enable(pipe, EXACT) as handle:
        runner = handle._runners[-1]
        layouts = []
        texts = []
        layout = runner.sparse.reader.layout

        def look(arguments):
            layouts.append(layout(arguments))
            texts.append(arguments.get("encoder_hidden_states", torch.empty(0, 0)).shape[1])
            return layouts[-1]

        runner.sparse.reader.layout = look
        found = generate(pipe, name, steps=steps)
    assert handle.report.actions()["sparse"] > 0
    recorded = [(entry.layer, entry.part) for entry in handle.report.steps[-1].layers]
    assert recorded == [
        *itertools.product(range(len(runner.sparse.patch.self_attentions())), PARTS),
    ]
    assert_expected(handle.report, family)
    assert_close(found, dense(name, steps=steps))
    space, _ = vae_factors(pipe.vae.config)
    frames = frame_chunks(pipe.vae.config).latents_of(family.call.get("num_frames", 1))
    planned = runner.sparse.family.planned_layout(
        runner.transformer.config,
        latents=(frames, family.call["height"] // space, family.call["width"] // space),
        text_tokens=family.call.get("max_sequence_length", texts[0]),
        batch=layouts[0].batch,
    )
    assert set(layouts) == {planned}


@pytest.mark.parametrize(
    ("name", "calls"),
    [
        *((name, [BASE]) for name in sorted(MODELS)),
        *(slow(name, [BASE]) for name in FAMILIES if name not in MODELS),
        *(slow(name, variants_of(name)[1:]) for name in FAMILIES if FAMILIES[name].variants),
    ],
)
def test_every_call_runs_sparse_and_leaves_no_trace(name, calls):
    family = FAMILIES[name]
    pipe = FAMILIES[name].make()
    with chipsparse.enable(pipe, SPARSE) as handle:
        for variant in calls:
            found = generate(pipe, name, variant)
            assert found.isfinite().all(), variant
            assert not torch.equal(found, dense(name, variant))
            assert_expected(handle.report, family, variant)
            assert set(handle.report.actions()) >= {"refresh", "sparse"}
            for branch in {record.branch for record in handle.report.steps}:
                steps = [record.step for record in handle.report.steps if record.branch == branch]
                assert steps == [*range(STEPS - len(steps), STEPS)]  # some begin late
            for record in handle.report.steps:
                kept = {"attention": record.attention_kept, "mlp": record.mlp_kept}
                for part in PARTS:
                    is_dense = part in dense_parts(family, variant)
                    assert (kept[part] is not None) == (record.action == "sparse" and not is_dense)
        assert torch.equal(generate(pipe, name), sparse(name))
    with chipsparse.enable(pipe, SPARSE.override({"memory.offload": "always"})) as handle:
        assert torch.equal(generate(pipe, name), sparse(name))
    assert handle.report.host_bytes > 0
    assert_expected(handle.report, family)


@each_model
def test_the_tile_order_changes_the_groups_and_not_the_model(name):
    raster = {"tile": None}
    pipe = FAMILIES[name].make()
    with chipsparse.enable(pipe, EXACT.override(raster)):
        assert_close(generate(pipe, name), dense(name))
    with chipsparse.enable(pipe, SPARSE.override(raster)):
        assert not torch.equal(generate(pipe, name), sparse(name))


# Families whose text stands in the sequence, and a call of each.
JOINT = {
    "cogvideox 2b": BASE,
    "cosmos 3": "sound, prompts of two lengths",
    "flux": BASE,
    "flux2": "a reference",
    "hidream": "odd size",
    "hunyuan video": "short prompt",
    "minimax h3": "references",
    "mochi": "guided",
    "qwen-image": "padded",
    "sd3": BASE,
}


@slow_unless({"cogvideox 2b", "flux", "minimax h3", "mochi"}, JOINT)
def test_columns_of_text_are_always_kept_and_those_of_its_padding_never(name):
    """No others fit; in every branch, whose prompts may differ in length."""
    pipe = FAMILIES[name].make()
    columns = {}
    neurons = {}
    layouts = {}
    config = SPARSE.override({"attention.density": 0.01})
    with chipsparse.enable(pipe, config) as handle:
        session = handle._runners[0].sparse.session
        begin = session.begin
        caches = session._caches

        def look(decision, plan, reading):
            layouts[decision.place.branch] = reading.layout
            if decision.place.step == 2 and not columns:  # behind the refresh
                columns.update({key: caches[key].attention.columns for key in caches})
                neurons.update({key: caches[key].mlp.activation.shape[1] for key in caches})
            return begin(decision, plan, reading)

        session.begin = look
        generate(pipe, name, JOINT[name], steps=4)
    assert {branch for branch, _ in columns} == set(layouts)
    for (branch, layer), packed in columns.items():
        layout = layouts[branch]
        kept = unpack_mask(packed, layout.tokens)
        first = 0 if layout.text_first else layout.grid_tokens
        text = kept[..., first : first + layout.text_tokens]
        assert text.shape[-1] == layout.text_tokens > 0
        assert text.all()
        assert (kept.sum(-1) == layout.text_tokens).all()
        assert neurons[branch, layer] == layout.mlp_tokens(layer)


@each_model
def test_disable_restores_the_models_bit_for_bit(name):
    pipe = FAMILIES[name].make()
    models = transformers_of(pipe)
    before = [state_of(model) for model in models]
    weights = [{key: value.clone() for key, value in m.state_dict().items()} for m in models]
    for used in (False, True):
        handle = chipsparse.enable(pipe, SPARSE)
        assert [list(model.state_dict()) for model in models] == [list(saved) for saved in weights]
        if used:
            generate(pipe, name)
        assert [state_of(model) for model in models] != before
        handle.disable()
        handle.disable()
        assert [state_of(model) for model in models] == before
        for model, saved in zip(models, weights, strict=True):
            after = model.state_dict()
            assert all(torch.equal(after[key], value) for key, value in saved.items())
    assert torch.equal(generate(pipe, name), dense(name))


@slow_unless(WHOLE)
def test_gradients_are_left_alone(name):
    pipe = FAMILIES[name].make()
    (*_, model) = transformers_of(pipe)
    call = calls_of(model, lambda: generate(pipe, name))[-1]
    expected = as_batch(model(**call)[0])
    with chipsparse.enable(pipe, SPARSE) as handle:
        generate(pipe, name)
        seen = len(handle.report.steps)
        found = as_batch(model(**call)[0])
        found.sum().backward()
        assert len(handle.report.steps) == seen
        for attention in handle._runners[-1].sparse.patch.self_attentions():
            assert any(parameter.grad is not None for parameter in attention.parameters())
    assert torch.equal(found, expected)


@each_model
def test_the_transformer_may_be_called_in_any_way(name):
    pipe = FAMILIES[name].make()
    (*_, model) = transformers_of(pipe)
    call = calls_of(model, lambda: generate(pipe, name))[-1]
    del call["return_dict"]
    names = inspect.signature(model.forward).parameters
    positional = [call.pop(each) for each in itertools.takewhile(call.__contains__, names)]
    with torch.no_grad():
        expected = model(*positional, **call).sample
        with chipsparse.enable(pipe, SPARSE):
            for return_dict in (False, True):
                found = model(*positional, **call, return_dict=return_dict)
                assert isinstance(found, tuple | torch.Tensor) != return_dict
                assert_close(found if isinstance(found, torch.Tensor) else found[0], expected)


@slow_unless(
    {"flux", "hunyuan video 1.5", "mochi", "wan 2.1"},
    [
        name
        for name in IN_FULL
        if not FAMILIES[name].unpatched_steps  # patched again after these
        and "attention" not in FAMILIES[name].dense_parts
    ],
)
def test_a_processor_that_was_replaced_runs_dense_and_stays(name):
    pipe = FAMILIES[name].make()
    with chipsparse.enable(pipe, EXACT) as handle:
        runner = handle._runners[-1]
        first, *others = runner.sparse.patch.self_attentions()
        own = first.processor = stock_class(first.processor)()
        before = dict(vars(own))
        found = generate(pipe, name)
    layers = 1 + len(others)
    assert any(
        sentence.startswith(f"attention runs dense in 1 of {layers} layers (first: layer 0): ")
        and sentence.endswith("its processor was replaced")
        for sentence in handle.report.fallbacks
    )
    assert handle.report.steps[-1].attention_kept == 1
    assert_close(found, dense(name))
    assert first.processor is own
    assert vars(own) == before


@slow_unless({"flux", "qwen-image", "wan 2.1"})
def test_the_attention_backend_may_change_and_be_reset_while_enabled(name):
    config = SPARSE.override(
        {"layers": [{"index": 0, "attention": "dense", "mlp": "dense"}]},
    )  # which the backend computes
    pipe = FAMILIES[name].make()
    other = FAMILIES[name].make()
    with attention_backend("native"):  # diffusers sets it globally, too: restore it
        with chipsparse.enable(pipe, config) as handle:
            runner = handle._runners[0]
            stock = generate(pipe, name)
            pipe.transformer.set_attention_backend("_native_math")
            changed = generate(pipe, name)
            pipe.transformer.reset_attention_backend()
            assert runner.sparse.patch._unpatched_backends[0] is None
        with attention_backend("native"), chipsparse.enable(pipe, config):
            assert torch.equal(generate(pipe, name), stock)
        # Processors of the family's own have no backend to set.
        if not runner.sparse.family.attention.processors:
            other.transformer.set_attention_backend("_native_math")
            with chipsparse.enable(other, config):
                assert torch.equal(generate(other, name), changed)
    assert not torch.equal(changed, stock)


@pytest.mark.parametrize("removed", [False, True])
@slow_unless({"flux", "wan 2.1"})
def test_hooks_on_modules_outlive_the_patches(name, removed):
    """They keep the method that they stand before, a patched one."""
    pipe = FAMILIES[name].make()
    expected = generate(pipe, name)
    with chipsparse.enable(pipe, SPARSE):
        hooked = [each for model in transformers_of(pipe) for each in model.modules()]
        for module in hooked:
            add_hook_to_module(module, ModelHook())
        generate(pipe, name)
        for module in hooked if removed else ():
            remove_hook_from_module(module)
    assert torch.equal(generate(pipe, name), expected)


def compile_blocks(model):
    """Does what `compile_repeated_blocks` does, also for models that do not name their blocks."""
    options = {"backend": "eager", "fullgraph": True}
    if getattr(model, "_repeated_blocks", None):
        model.compile_repeated_blocks(**options)
        return
    for child in model.children():
        for block in child if isinstance(child, torch.nn.ModuleList) else []:
            block.compile(**options)


@slow_unless({"flux"})
def test_compiled_blocks_share_one_graph_for_each_kind(name):
    family = FAMILIES[name]
    pipe = FAMILIES[name].make()
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    with chipsparse.enable(pipe, SPARSE):
        for model in transformers_of(pipe):
            compile_blocks(model)
        assert_close(generate(pipe, name), sparse(name), 1e-5)
        assert counters["stats"]["unique_graphs"] == family.kinds
        if family.kinds == 1 and "odd size" in family.variants:  # more kinds take too long here
            generate(pipe, name, "odd size")
            # With another size come graphs for any size, at most one for each length that changes.
            assert counters["stats"]["unique_graphs"] <= 3
    assert not counters["graph_break"]
    torch._dynamo.reset()
