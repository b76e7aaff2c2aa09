"""A patched pipeline is the stock one in all but its calls, and leaves nothing behind them."""

import copy
import gc
import inspect
import pickle
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor

import diffusers
import pytest
import torch
from accelerate import cpu_offload_with_hook
from accelerate.hooks import remove_hook_from_module
from diffusers import DiffusionPipeline, FluxPipeline, WanPipeline

import chipsparse
from chipsparse.kernels.column_sparse_attention import reference
from chipsparse.pipelines.runner import RUNNER
from tests.pipelines.changes import at_step, offload_groups
from tests.pipelines.model_state import state_of
from tests.pipelines.tiny_runs import STILL, WAN
from tests.tiny_models import tiny_wan_pipeline, tiny_wan_transformer
from tests.variants import slow

CONFIG = STILL.SPARSE
wan = STILL.generate


@pytest.fixture(scope="module")
def dense():
    return wan(tiny_wan_pipeline())


@pytest.fixture(scope="module")
def sparse():
    pipe = tiny_wan_pipeline()
    with chipsparse.enable(pipe, CONFIG):
        return wan(pipe)


def test_its_class_is_the_stock_one_to_whoever_looks(pipe):
    signature = inspect.signature(pipe.__call__)
    with chipsparse.enable(pipe, CONFIG):
        assert isinstance(pipe, WanPipeline)
        found = type(pipe)
        assert found == WanPipeline
        assert hash(found) == hash(WanPipeline)
        assert found != FluxPipeline
        assert (found.__name__, found.__qualname__) == ("WanPipeline", "WanPipeline")
        assert (found.__module__, found.__doc__) == (WanPipeline.__module__, WanPipeline.__doc__)
        assert inspect.signature(pipe.__call__) == signature
        assert pipe.__call__.__doc__ == WanPipeline.__call__.__doc__
        assert pipe.components.keys() == tiny_wan_pipeline().components.keys()
        assert pipe.to(torch.float32) is pipe
    assert type(pipe) is WanPipeline
    assert not [name for name in vars(pipe) if "chipsparse" in name]


@pytest.mark.parametrize("of", ["pipeline", "transformer"])
def test_saved_files_are_those_of_the_stock_model(pipe, tmp_path, dense, of):
    before = tmp_path / "before"
    after = tmp_path / "after"
    saved = pipe if of == "pipeline" else pipe.transformer
    saved.save_pretrained(before)
    with chipsparse.enable(pipe, CONFIG):
        saved.save_pretrained(after)
    files = sorted(file.relative_to(before) for file in before.rglob("*") if file.is_file())
    assert files == sorted(file.relative_to(after) for file in after.rglob("*") if file.is_file())
    for file in files:
        assert (before / file).read_bytes() == (after / file).read_bytes(), file
    if of == "pipeline":
        loaded = DiffusionPipeline.from_pretrained(after)
        assert type(loaded) is WanPipeline
        loaded.set_progress_bar_config(disable=True)
        assert torch.equal(wan(loaded), dense)


def test_instances_of_a_patched_class_are_stock_ones(pipe, dense, sparse):
    with chipsparse.enable(pipe, CONFIG):
        model = type(pipe.transformer)
        assert type(model.from_config(pipe.transformer.config)) is diffusers.WanTransformer3DModel
        other = type(pipe)(**tiny_wan_pipeline().components)
        other.set_progress_bar_config(disable=True)
        assert type(other) is WanPipeline
        assert torch.equal(wan(other), dense)
        shared = type(pipe)(**pipe.components)
        shared.set_progress_bar_config(disable=True)
        assert torch.equal(wan(shared), sparse)  # through the transformer that both have


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
@pytest.mark.parametrize("of", ["pipeline", "transformer"])
def test_copies_and_pickles_are_refused_by_name(pipe, duplicate, of):
    patched = pipe if of == "pipeline" else pipe.transformer
    said = f"this {type(patched).__name__} while chipsparse has it patched; call chip"
    with chipsparse.enable(pipe, CONFIG), pytest.raises(TypeError, match=said):
        duplicate(patched)
    duplicate(patched)


def test_a_copy_of_a_layer_says_why_it_does_not_run(pipe):
    with chipsparse.enable(pipe, CONFIG):
        block = copy.deepcopy(pipe.transformer.blocks[0])
    hidden = torch.zeros(1, 4, 64)
    with torch.no_grad(), pytest.raises(RuntimeError, match="a copy of a layer that chipsparse"):
        block.attn1(hidden, None, None, None)


def in_a_thread(call):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).exception()


@pytest.mark.parametrize("through", ["the same pipeline", "another pipeline"])
def test_a_second_thread_is_refused_and_the_first_one_undisturbed(pipe, sparse, through):
    other = pipe if through == "the same pipeline" else WanPipeline(**pipe.components)
    name = "WanPipeline" if other is pipe else "WanTransformer3DModel"
    errors = []

    def disturb(_pipe, step, _t, tensors):
        if step == 2:
            timesteps = pipe.scheduler.timesteps, pipe.scheduler.sigmas, pipe.scheduler.step_index
            errors.append(in_a_thread(lambda: wan(other)))
            pipe.scheduler.timesteps, pipe.scheduler.sigmas, pipe.scheduler._step_index = timesteps
        return tensors

    with chipsparse.enable(pipe, CONFIG):
        assert torch.equal(wan(pipe, callback_on_step_end=disturb), sparse)
        assert in_a_thread(lambda: wan(pipe)) is None  # one after the other
    (error,) = errors
    assert isinstance(error, RuntimeError)
    assert str(error).startswith(f"this {name} is in use by another thread; chipsparse keeps")


def test_whoever_asks_in_another_thread_whether_it_is_interrupted_ends_nothing(pipe, sparse):
    """As a server does that shows which calls are being stopped."""
    answers = []

    def ask():
        answers.append(pipe.interrupt)

    def between():
        pipe._interrupt = True
        assert in_a_thread(ask) is None
        pipe._interrupt = False  # before the loop looks at it

    with chipsparse.enable(pipe, CONFIG):
        assert torch.equal(wan(pipe, callback_on_step_end=at_step(None, between)), sparse)
    assert answers == [True] * 5


def test_a_call_within_a_call_of_the_same_thread_is_let_in(pipe, sparse):
    inner = []
    preview = at_step(4, lambda: inner.append(wan(pipe)))
    with chipsparse.enable(pipe, CONFIG):
        assert torch.equal(wan(pipe, callback_on_step_end=preview), sparse)
    assert torch.equal(inner[0], sparse)


def test_a_failing_enable_leaves_the_pipeline_as_it_was():
    pipe = tiny_wan_pipeline(transformer_2=tiny_wan_transformer(seed=9), boundary_ratio=0.5)
    del pipe.transformer_2.blocks[1].attn1.processor
    before = state_of(pipe.transformer)
    with pytest.raises(AttributeError):
        chipsparse.enable(pipe, CONFIG)
    assert state_of(pipe.transformer) == before
    assert RUNNER not in vars(pipe.transformer_2)


def test_nothing_keeps_a_dropped_pipeline_alive():
    pipe = tiny_wan_pipeline()
    chipsparse.enable(pipe, CONFIG)
    wan(pipe, num_inference_steps=2)
    transformer = weakref.ref(pipe.transformer)
    del pipe
    gc.collect()
    assert transformer() is None


def test_group_offload_by_block(pipe, sparse):
    with chipsparse.enable(pipe, CONFIG) as handle:
        offload_groups(pipe.transformer)
        assert torch.equal(wan(pipe), sparse)
    assert handle.report.fallbacks == []


@pytest.mark.parametrize("enable_first", [True, slow(False)])
def test_model_offload_hooks_may_come_and_go(pipe, sparse, dense, enable_first):
    """`enable_model_cpu_offload` with the CPU in the place of the accelerator."""
    handle = chipsparse.enable(pipe, CONFIG) if enable_first else None
    for _ in range(2):
        cpu_offload_with_hook(pipe.transformer, torch.device("cpu"))
        handle = handle or chipsparse.enable(pipe, CONFIG)
        assert torch.equal(wan(pipe), sparse)
        remove_hook_from_module(pipe.transformer, recurse=True)
    cpu_offload_with_hook(pipe.transformer, torch.device("cpu"))
    handle.disable()
    assert torch.equal(wan(pipe), dense)
    assert hasattr(pipe.transformer, "_hf_hook")


def test_few_of_our_frames_stand_around_the_dispatcher_at_a_sparse_step(pipe):
    """Those behind it are with the reference; a GPU has its kernel, and behind that `launch`."""
    seen = []

    def watch(frame, event, _):
        if event != "call" or frame.f_code is not reference.column_sparse_attention.__code__:
            return
        names = []
        while frame is not None:
            module = frame.f_globals.get("__name__", "")
            name = frame.f_code.co_name
            if module.startswith("chipsparse.") or name == "dispatch_attention_fn":
                names.append(f"{module.rpartition('.')[2]}.{name}")
            frame = frame.f_back
        if "attention._refresh" not in names:
            seen.append(names[::-1])

    with chipsparse.enable(pipe, WAN.SPARSE):
        sys.setprofile(watch)
        try:
            WAN.generate(pipe, num_inference_steps=3)
        finally:
            sys.setprofile(None)
    assert len(seen) == 2 * len(pipe.transformer.blocks)  # one sparse step, two branches
    for names in seen:
        dispatcher = names.index("attention_dispatch.dispatch_attention_fn")
        above = names[names.index("runner.__call__") : dispatcher]
        below = names[dispatcher + 1 :]
        assert above[1:] == ["runner.call", "runner._run_at", "step_graph.run"], names
        expected = ["attention.__call__", "attention._attend", "attention.sparse_step"]
        assert below[2:5] == expected, names
        assert len(below) <= 7, names
