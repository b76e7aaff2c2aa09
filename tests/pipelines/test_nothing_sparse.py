"""Generations in which nothing is sparse: said once, with the reason; refused where strict."""

import json
import warnings

import pytest
import torch

import chipsparse
from chipsparse import DenseWarning, FallbackError, SparsityConfig
from tests.pipelines.test_layer_budgets import CONFIG, generate, two_experts
from tests.tiny_models import tiny_wan_pipeline, tiny_wan_transformer

FEW = "nothing runs sparse: 3 steps are too few for the schedule, which needs at least 5"
EXCHANGED = (
    "nothing runs sparse: the pipeline's transformer was exchanged after enable(); call "
    "chipsparse.enable(pipe, ...) again"
)
LATE = CONFIG.override({"schedule.warmup_steps": 4})


@pytest.fixture
def pipe():
    return tiny_wan_pipeline()


def wan(pipe, **arguments):
    return generate(pipe, num_frames=1, guidance_scale=1.0, **arguments)


def test_too_few_steps_are_said_once_and_before_the_second_step(pipe):
    seen = []

    def look(_pipe, _step, _t, tensors):
        seen.append(handle.report.nothing_sparse)
        return tensors

    with chipsparse.enable(pipe, LATE) as handle:
        with pytest.warns(DenseWarning, match=FEW) as caught:
            wan(pipe, steps=3, callback_on_step_end=look)
        assert len(caught) == 1
        assert caught[0].filename.endswith("test_layer_budgets.py")  # the caller's own line
        assert seen == [handle.report.nothing_sparse] * 3
        data = handle.report.to_dict()
        assert data["nothing_sparse"].startswith(FEW)
        assert json.loads(json.dumps(data)) == data
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            wan(pipe, steps=3)  # the same again: in the report alone
        assert handle.report.nothing_sparse.startswith(FEW)
        wan(pipe)
        assert handle.report.nothing_sparse is None
    with chipsparse.enable(pipe, LATE), pytest.warns(DenseWarning, match=FEW):
        wan(pipe, steps=3)


def test_strict_refuses_before_the_first_step(pipe):
    with chipsparse.enable(pipe, LATE, strict=True) as handle:
        with pytest.raises(FallbackError, match=FEW):
            wan(pipe, steps=3)
        assert handle.report.nothing_sparse.startswith(FEW)
        assert handle.report.error.startswith("FallbackError: nothing runs sparse")
        assert [record.finished for record in handle.report.steps] == [False]
        wan(pipe)
        assert handle.report.actions()["sparse"] == 1


@pytest.mark.parametrize(
    "config",
    [
        SparsityConfig.dense(),
        CONFIG.override({"schedule.actions": ["dense"]}),
        CONFIG.override({"schedule.actions": ["dense", "refresh", "skip"]}),
    ],
    ids=["dense", "actions", "skipped"],
)
def test_nothing_is_said_where_nothing_is_missing(pipe, config):
    with warnings.catch_warnings(), chipsparse.enable(pipe, config, strict=True) as handle:
        warnings.simplefilter("error", DenseWarning)
        wan(pipe, steps=3)
    assert handle.report.nothing_sparse is None


def test_layers_that_all_run_dense_are_said_at_the_first_call(pipe):
    processor = type(pipe.transformer.blocks[0].attn1.processor)
    config = CONFIG.override({"mlp.enabled": False})
    seen = []

    def look(*_):
        seen.append(handle.report.nothing_sparse)

    with chipsparse.enable(pipe, config) as handle:
        for block in pipe.transformer.blocks:
            block.attn1.set_processor(processor())
        pipe.transformer.blocks[0].register_forward_pre_hook(look)
        with pytest.warns(DenseWarning, match="nothing runs sparse: attention runs dense in 3 of"):
            wan(pipe)
    assert seen == [handle.report.nothing_sparse] * 5
    assert handle.report.nothing_sparse.endswith("its processor was replaced")


def test_an_exchanged_transformer_is_noticed_by_the_next_call(pipe):
    stock, other = pipe.transformer, tiny_wan_transformer(seed=5)
    with chipsparse.enable(pipe, CONFIG) as handle:
        wan(pipe)
        pipe.transformer = other
        with pytest.warns(DenseWarning) as caught:
            wan(pipe)
        assert [str(each.message) for each in caught] == [EXCHANGED]
        report = handle.report
        assert (report.nothing_sparse, report.steps, report.error) == (EXCHANGED, [], None)
        pipe.transformer = stock
        wan(pipe)
        assert report.nothing_sparse is None
        assert report.actions()["sparse"] == 3
    with chipsparse.enable(pipe, CONFIG, strict=True) as handle:
        pipe.transformer = other
        other.register_forward_pre_hook(lambda *_: pytest.fail("computed a step"))
        with pytest.raises(FallbackError) as error:
            wan(pipe)
        assert str(error.value) == handle.report.nothing_sparse == EXCHANGED


def test_one_exchanged_expert_is_a_fallback():
    pipe = two_experts()
    said = "a transformer runs dense: the pipeline's transformer_2 was exchanged after enable()"
    with chipsparse.enable(pipe, CONFIG) as handle:
        pipe.transformer_2 = tiny_wan_transformer(seed=5)
        generate(pipe, num_frames=1, steps=8)
        assert [each.partition(";")[0] for each in handle.report.fallbacks] == [said]
        assert handle.report.nothing_sparse is None
        assert {record.transformer for record in handle.report.steps} == {"transformer"}
        generate(pipe, num_frames=1, steps=8)
        assert len(handle.report.fallbacks) == 1
    with chipsparse.enable(pipe, CONFIG, strict=True):
        pipe.transformer = tiny_wan_transformer(seed=6)
        with pytest.raises(FallbackError, match="the pipeline's transformer was exchanged"):
            generate(pipe, num_frames=1)


def test_a_transformer_compiled_as_a_whole_afterwards_outlives_disable(pipe):
    expected = generate(pipe, num_frames=1)
    with chipsparse.enable(pipe, CONFIG):
        pipe.transformer = torch.compile(pipe.transformer, backend="eager")
        generate(pipe, num_frames=1)
    assert torch.equal(generate(pipe, num_frames=1), expected)


def test_recorded_gradients_are_said(pipe):
    arguments = {
        "timestep": torch.tensor([500.0]),
        "encoder_hidden_states": torch.zeros(1, 4, 32),
        "return_dict": False,
    }
    said = "nothing runs sparse: gradients are recorded"
    with chipsparse.enable(pipe, CONFIG) as handle:
        with pytest.warns(DenseWarning, match=said):
            pipe.transformer(torch.zeros(1, 4, 2, 4, 4), **arguments)
        assert handle.report.nothing_sparse.startswith(said)


def test_an_interrupted_generation_is_not_blamed_on_the_config(pipe):
    def interrupt(pipe, _step, _t, tensors):
        pipe._interrupt = True
        return tensors

    with warnings.catch_warnings(), chipsparse.enable(pipe, CONFIG) as handle:
        warnings.simplefilter("error", DenseWarning)
        wan(pipe, callback_on_step_end=interrupt)
    assert handle.report.nothing_sparse is None
