"""Patched pipelines whose caches live in host memory, on whatever device the tests run on.

With the caches there the results are the same bits as without, whatever else is going on.
"""

import gc

import pytest
import torch

import chipsparse
from chipsparse.cache.memory_plan import BudgetError, Capacity
from tests.devices import DEVICES
from tests.pipelines import test_flux as flux
from tests.pipelines import test_wan as wan
from tests.schedules import listed
from tests.tiny_models import tiny_flux_pipeline, tiny_wan_pipeline, tiny_wan_transformer
from tests.variants import slow, slow_unless

HOSTED = {"memory.offload": "always"}
PLACES = 2 * 5 * 9  # branches, layers and kinds at most: each place is rounded up a little
MODELS = {"wan": (tiny_wan_pipeline, wan), "flux": (tiny_flux_pipeline, flux)}


@pytest.fixture(params=DEVICES)
def device(request):
    return torch.device(request.param)


def memory_of(handle):
    (adapter, *_) = handle._adapters
    return adapter.session._pool.host


@pytest.mark.parametrize(("model", "rule"), [slow("wan", "merge"), ("flux", "difference")])
def test_the_same_bits_as_with_caches_on_the_device(model, rule, device):
    make, module = MODELS[model]
    pipe = make().to(device)
    config = module.SPARSE.override({"attention.delta_rule": rule, **listed("DRSKSRS")})
    with chipsparse.enable(pipe, config):
        expected = module.generate(pipe)
    with chipsparse.enable(pipe, config.override(HOSTED)) as handle:
        for _ in range(2):
            assert torch.equal(module.generate(pipe), expected)
        report = handle.report
        assert report.fallbacks == []
        assert 0 < report.host_bytes <= report.cache_bytes
        memory = memory_of(handle)
        assert memory.pinned_bytes == (memory.nbytes if device.type == "cuda" else 0)
        assert memory.nbytes < 1.05 * report.host_bytes + 512 * PLACES
        sparse = [record for record in report.steps if record.action.value == "sparse"]
        assert all(record.bytes_to_device > 0 for record in sparse)
    assert memory.nbytes == 0


def test_true_guidance_of_flux_brings_a_branch_that_nobody_announced(device):
    settings = {"true_cfg_scale": 3.0, "negative_prompt": "a green square"}
    pipe = tiny_flux_pipeline().to(device)
    with chipsparse.enable(pipe, flux.SPARSE):
        expected = flux.generate(pipe, **settings)
    with chipsparse.enable(pipe, flux.SPARSE.override(HOSTED)) as handle:
        assert torch.equal(flux.generate(pipe, **settings), expected)
        assert {record.branch for record in handle.report.steps} == {"cond", "uncond"}
        assert handle.report.fallbacks == []


def test_true_guidance_of_flux_shares_out_short_memory():
    """On a CPU, whose one memory is short where that of the host is."""
    settings = {"true_cfg_scale": 3.0, "negative_prompt": "a green square"}
    config = flux.SPARSE.override({**HOSTED, "memory.cache_precision": "full"})
    pipe = tiny_flux_pipeline()
    with chipsparse.enable(pipe, config) as handle:
        flux.generate(pipe, **settings)
        short = round(0.6 * handle.report.host_bytes)
    with chipsparse.enable(pipe, config.override({"memory.ram": short})) as handle:
        flux.generate(pipe, **settings)
        kept = {
            (record.branch, layer.layer, layer.part)
            for record in handle.report.steps
            for layer in record.layers
            if layer.action.value == "sparse"
        }
        assert 0 < handle.report.host_bytes <= short
        assert any("its caches do not fit" in each for each in handle.report.fallbacks)
    sparse = {branch: {each[1:] for each in kept if each[0] == branch} for branch, *_ in kept}
    assert sparse.keys() == {"cond", "uncond"}
    assert sparse["cond"] == sparse["uncond"]


def test_two_experts_use_the_same_host_memory(device):
    experts = {"transformer_2": tiny_wan_transformer(seed=9), "boundary_ratio": 0.9}
    pipe = tiny_wan_pipeline(**experts).to(device)
    with chipsparse.enable(pipe, wan.SPARSE):
        expected = wan.generate(pipe)
    held = []
    with chipsparse.enable(pipe, wan.SPARSE.override(HOSTED)) as handle:

        def look(_pipe, _step, _t, tensors):
            held.append(memory_of(handle).nbytes)
            return tensors

        assert torch.equal(wan.generate(pipe, callback_on_step_end=look), expected)
    assert len(set(held)) == 1


@pytest.mark.parametrize("model", slow_unless(("flux",), MODELS))
def test_other_sizes_and_batches_straight_after(model, device):
    make, module = MODELS[model]
    changes = [
        {"height": 96, "width": 48},
        {"prompt": ["a red circle", "a blue square moves right"]},
    ]
    plain, hosted = make().to(device), make().to(device)
    with (
        chipsparse.enable(plain, module.SPARSE),
        chipsparse.enable(hosted, module.SPARSE.override(HOSTED)),  # two pipelines at a time
    ):
        for change in [*changes, {}]:
            expected = module.generate(plain, **change)
            assert torch.equal(module.generate(hosted, **change), expected)


@pytest.mark.parametrize(("error", "step"), [slow(RuntimeError, 1), (torch.OutOfMemoryError, 3)])
def test_an_aborted_call_frees_everything_and_the_next_one_is_right(error, step, device):
    pipe = tiny_wan_pipeline().to(device)
    with chipsparse.enable(pipe, wan.SPARSE):
        expected = wan.generate(pipe)
    calls = []

    def fail(*_):
        calls.append(None)
        if len(calls) == 2 * step + 2:
            raise error("injected")

    with chipsparse.enable(pipe, wan.SPARSE.override(HOSTED)) as handle:
        (adapter,) = handle._adapters
        hook = pipe.transformer.blocks[1].register_forward_hook(fail)
        with pytest.raises(error, match="injected"):
            wan.generate(pipe)
        hook.remove()
        assert adapter.session.cache_bytes() == 0
        assert memory_of(handle).lent_bytes == 0
        assert torch.equal(wan.generate(pipe), expected)


def test_disable_while_copies_are_under_way(device):
    """In the middle of a generation, straight after a refresh queued its write-backs."""
    pipe = tiny_wan_pipeline().to(device)
    expected = wan.generate(pipe)
    handle = chipsparse.enable(pipe, wan.SPARSE.override(HOSTED))
    memory, held = memory_of(handle), []

    def stop(_pipe, step, _t, tensors):
        if step == 1:
            held.append(memory.nbytes)
            handle.disable()
            held.append(memory.nbytes)
        return tensors

    wan.generate(pipe, callback_on_step_end=stop)
    assert held[0] > 0
    assert held[1] == 0
    assert torch.equal(wan.generate(pipe), expected)


def test_host_memory_that_is_refused(device, monkeypatch):
    pipe = tiny_wan_pipeline().to(device)
    with chipsparse.enable(pipe, wan.SPARSE):
        expected = wan.generate(pipe)

    def refuse(nbytes):
        raise MemoryError("nothing left")

    monkeypatch.setattr("chipsparse.cache.host_memory._map", refuse)
    with chipsparse.enable(pipe, wan.SPARSE.override(HOSTED)) as handle:
        assert torch.equal(wan.generate(pipe), expected)
        assert "host memory for caches was refused (nothing left)" in handle.report.notes[0]
        assert handle.report.host_bytes == 0


@pytest.mark.parametrize(("model", "overrides"), [*zip(MODELS, [HOSTED, {}], strict=True)])
def test_the_caches_are_gone_before_the_latents_are_decoded(model, overrides, device, monkeypatch):
    make, module = MODELS[model]
    pipe = make().to(device)
    held, decode = [], pipe.vae.decode
    with chipsparse.enable(pipe, module.SPARSE.override(overrides)) as handle:
        (adapter,) = handle._adapters

        def watched(*args, **kwargs):
            held.append((adapter.session.cache_bytes(), adapter.session._pool.slots))
            return decode(*args, **kwargs)

        monkeypatch.setattr(pipe.vae, "decode", watched)
        settings = {"num_inference_steps": 4, "max_sequence_length": 16}
        sizes = {"height": 32, "width": 48} | ({"num_frames": 5} if model == "wan" else {})
        pipe("a red circle", **settings, **sizes)
        assert held == [(0, {})]
        assert handle.report.cache_bytes > 0


def test_layers_that_cannot_run_sparse_take_no_memory(device):
    class Packed(torch.nn.Parameter):
        pass

    pipe = tiny_wan_pipeline().to(device)
    linear = pipe.transformer.blocks[1].ffn.net[2]
    linear.weight = Packed(linear.weight.data)
    placements = []
    with chipsparse.enable(pipe, wan.SPARSE.override(HOSTED)) as handle:
        (adapter,) = handle._adapters

        def look(_pipe, step, _t, tensors):
            for branch in adapter.session._caches._branches.values():
                placements.append(branch.memory.placement)
            return tensors

        wan.generate(pipe, callback_on_step_end=look)
        (fallback,) = handle.report.fallbacks
        assert "the weight of its second linear is a Packed" in fallback
    assert all(placement.recomputed == frozenset() for placement in placements)
    assert {layer for layer, kind in placements[0].host if kind == "activation"} == {0, 2}
    assert {layer for layer, kind in placements[0].host if kind == "residual"} == {0, 1, 2}


def test_budgets_that_hold_a_part_of_the_layers(device, monkeypatch):
    """The others run dense, and the report says which."""
    pipe = tiny_wan_pipeline().to(device)
    with chipsparse.enable(pipe, wan.SPARSE) as handle:
        sparse = wan.generate(pipe)
        need = handle.report.cache_bytes
    monkeypatch.setattr("chipsparse.cache.store.available", lambda *_, **__: Capacity(need // 2, 0))
    in_full = {"memory.cache_precision": "full"}
    with chipsparse.enable(pipe, wan.SPARSE.override(in_full)) as handle:
        found = wan.generate(pipe)
        assert handle.report.cache_bytes <= need // 2
    assert any("caches do not fit" in each for each in handle.report.fallbacks)
    assert (found - sparse).norm() < 0.3 * sparse.norm()


def test_a_budget_for_nothing_is_refused_before_the_first_step(device):
    pipe = tiny_wan_pipeline().to(device)
    steps = []

    def count(_pipe, step, _t, tensors):
        steps.append(step)
        return tensors

    budgets = {"memory.vram": 1, "memory.ram": 1}
    with chipsparse.enable(pipe, wan.SPARSE.override(budgets)):
        with pytest.raises(BudgetError, match="not one layer's caches fit: all of them need"):
            wan.generate(pipe, callback_on_step_end=count)
        assert steps == []
        dense = {"attention.density": "dense", "mlp.density": "dense"}
    with chipsparse.enable(pipe, wan.SPARSE.override(budgets | dense)):
        wan.generate(pipe)  # needs no caches


@pytest.mark.slow
def test_fifty_generations_grow_nothing(device):
    pipe = tiny_wan_pipeline().to(device)
    held = []
    with chipsparse.enable(pipe, wan.SPARSE.override(HOSTED)) as handle:
        for _ in range(50):
            wan.generate(pipe)
            gc.collect()
            reserved = torch.cuda.memory_reserved() if device.type == "cuda" else 0
            held.append((memory_of(handle).nbytes, reserved, resident_bytes()))
    assert {each[:2] for each in held[2:]} == {held[2][:2]}
    assert max(each[2] for each in held[2:]) - held[2][2] < 8 << 20  # Python's own heap


def resident_bytes():
    with open("/proc/self/statm", encoding="ascii") as statistics:
        return int(statistics.read().split()[1]) * 4096
