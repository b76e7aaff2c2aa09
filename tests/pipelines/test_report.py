"""The report of whole pipelines: what ran, why something was dense, and runs that refuse that."""

import warnings

import pytest
import torch

import chipsparse
from chipsparse import DenseWarning, FallbackError
from tests.pipelines.changes import Adapted, at_step
from tests.pipelines.tiny_runs import STILL
from tests.schedules import letters_of
from tests.tiny_models import PROMPT, tiny_wan_pipeline, tiny_wan_transformer

CONFIG = STILL.SPARSE
wan = STILL.generate
FEW = "nothing runs sparse: 3 steps are too few for the schedule, which needs at least 6"
EXCHANGED = (
    "nothing runs sparse: the pipeline's transformer was exchanged after enable(); call "
    "chipsparse.enable(pipe, ...) again"
)
LATE = CONFIG.override({"schedule.periodic.warmup": 4})


def adapted(pipe):
    pipe.transformer.blocks[1].ffn.net[2].__class__ = Adapted


def other_processors(pipe):
    for block in pipe.transformer.blocks:
        block.attn1.set_processor(type(block.attn1.processor)())


def no_tags(pipe):
    """As if the model passed a mask of its own, which nobody foresaw."""
    for block in pipe.transformer.blocks:
        block.attn1._forward_pre_hooks.clear()
        block.attn1._forward_pre_hooks_with_kwargs.clear()


def test_an_exception_in_the_model_is_reported(pipe):
    calls = []

    def breaks(*_):
        calls.append(1)
        if len(calls) == 3:
            raise ValueError("at the third call\nof five")

    with chipsparse.enable(pipe, CONFIG) as handle:
        hook = pipe.transformer.blocks[2].register_forward_pre_hook(breaks)
        with pytest.raises(ValueError, match="third"):
            wan(pipe)
        hook.remove()
        data = handle.report.to_dict()
        assert data["error"] == "ValueError: at the third call"
        assert [step["finished"] for step in data["steps"]] == [True, True, False]
        assert len(data["steps"][2]["layers"]) == 4  # of the two blocks before
        wan(pipe)
        assert handle.report.error is None
        assert [record.finished for record in handle.report.steps] == [True] * 5


@pytest.mark.parametrize(
    ("spoil", "said", "calls"),
    [
        (adapted, "MLP runs dense in 1 of 3 layers (first: layer 1): its second linear", 1),
        (other_processors, "attention runs dense in 3 of 3 layers (first: layer 0): its proc", 1),
        (no_tags, "attention of layer 0 was computed by the model itself at step 2", 3),
    ],
)
def test_a_fallback_ends_a_strict_run(pipe, spoil, said, calls):
    dense = wan(pipe)
    handle = chipsparse.enable(pipe, CONFIG, strict=True)
    spoil(pipe)
    for _ in range(2):
        with pytest.raises(FallbackError) as error:
            wan(pipe)
        assert str(error.value).startswith(said)
        assert handle.report.fallbacks == [str(error.value)]
        assert handle.report.error == f"FallbackError: {error.value}"
        assert len(handle.report.steps) == calls
        session = handle._runners[0].sparse.session
        assert (session.plan, session.cache_bytes()) == (None, 0)
    handle.disable()
    assert torch.equal(wan(pipe), dense)


def test_recording_gradients_is_a_fallback_and_is_said(pipe):
    arguments = {
        "timestep": torch.tensor([500.0]),
        "encoder_hidden_states": torch.zeros(1, 4, 32),
        "return_dict": False,
    }
    with chipsparse.enable(pipe, CONFIG) as handle:
        with pytest.warns(DenseWarning, match="nothing runs sparse: gradients are recorded"):
            pipe.transformer(torch.zeros(1, 4, 2, 4, 4), **arguments)
        assert handle.report.fallbacks == ["everything runs dense: gradients are recorded"]
    refused = pytest.raises(FallbackError, match="gradients are recorded")
    with chipsparse.enable(pipe, CONFIG, strict=True), refused:
        pipe.transformer(torch.zeros(1, 4, 2, 4, 4), **arguments)
    with warnings.catch_warnings(), chipsparse.enable(pipe, chipsparse.SparsityConfig.dense()):
        warnings.simplefilter("error", DenseWarning)
        pipe.transformer(torch.zeros(1, 4, 2, 4, 4), **arguments)  # nothing sparse was wanted


def test_steps_with_gradients_stand_in_the_report_as_dense(pipe):
    """As where a reward is trained through the last steps alone."""
    text, _ = pipe.encode_prompt(PROMPT, do_classifier_free_guidance=False, max_sequence_length=16)
    pipe.scheduler.set_timesteps(5)
    latents = torch.zeros(1, 4, 2, 4, 8)
    with chipsparse.enable(pipe, CONFIG) as handle, handle.generation():
        for step, time in enumerate(pipe.scheduler.timesteps):
            with torch.set_grad_enabled(step >= 3):
                output = pipe.transformer(latents, time.expand(1), text, return_dict=False)[0]
                latents = pipe.scheduler.step(output, time, latents, return_dict=False)[0]
    assert latents.requires_grad
    report = handle.report
    assert letters_of(record.action.value for record in report.steps) == "DRSDD"
    assert [(record.step, record.finished) for record in report.steps] == [
        (step, True) for step in range(5)
    ]
    assert all(record.seconds > 0 for record in report.steps)
    assert report.fallbacks == ["everything runs dense: gradients are recorded"]
    assert report.nothing_sparse is None
    assert "5: 3 dense, 1 refresh, 1 sparse" in handle.summary()
    assert len(report.to_dict()["steps"]) == 5


def test_too_few_steps_are_said_once_and_before_the_second_step(pipe):
    seen = []
    look = at_step(None, lambda: seen.append(handle.report.nothing_sparse))
    with chipsparse.enable(pipe, LATE) as handle:
        with pytest.warns(DenseWarning, match=FEW) as caught:
            wan(pipe, num_inference_steps=3, callback_on_step_end=look)
        assert len(caught) == 1
        assert caught[0].filename.endswith("tiny_runs.py")  # the caller's own line
        assert seen == [handle.report.nothing_sparse] * 3
        assert handle.report.to_dict()["nothing_sparse"].startswith(FEW)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            wan(pipe, num_inference_steps=3)  # the same again: in the report alone
        assert handle.report.nothing_sparse.startswith(FEW)
        wan(pipe, num_inference_steps=6)
        assert handle.report.nothing_sparse is None
    with chipsparse.enable(pipe, LATE, strict=True) as handle:
        with pytest.raises(FallbackError, match=FEW):
            wan(pipe, num_inference_steps=3)
        assert handle.report.nothing_sparse.startswith(FEW)
        assert handle.report.error.startswith("FallbackError: nothing runs sparse")
        assert [record.finished for record in handle.report.steps] == [False]
        wan(pipe, num_inference_steps=6)
        assert handle.report.actions()["sparse"] == 1


def test_nothing_is_said_where_a_call_is_interrupted(pipe):
    interrupt = at_step(None, lambda: setattr(pipe, "_interrupt", True))
    with warnings.catch_warnings(), chipsparse.enable(pipe, CONFIG, strict=True) as handle:
        warnings.simplefilter("error", DenseWarning)
        wan(pipe, callback_on_step_end=interrupt)
    assert handle.report.nothing_sparse is None


def test_layers_that_all_run_dense_are_said_at_the_first_call(pipe):
    seen = []
    with chipsparse.enable(pipe, CONFIG.override({"mlp.density": "dense"})) as handle:
        other_processors(pipe)
        pipe.transformer.blocks[0].register_forward_pre_hook(
            lambda *_: seen.append(handle.report.nothing_sparse),
        )
        with pytest.warns(DenseWarning, match="nothing runs sparse: attention runs dense in 3 of"):
            wan(pipe)
    assert seen == [handle.report.nothing_sparse] * 5
    assert handle.report.nothing_sparse.endswith("its processor was replaced")


def test_an_exchanged_transformer_is_noticed_by_the_next_call(pipe):
    stock = pipe.transformer
    other = tiny_wan_transformer(seed=5)
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
    pipe = tiny_wan_pipeline(transformer_2=tiny_wan_transformer(seed=9), boundary_ratio=0.5)
    said = "a transformer runs dense: the pipeline's transformer_2 was exchanged after enable()"
    with chipsparse.enable(pipe, CONFIG) as handle:
        pipe.transformer_2 = tiny_wan_transformer(seed=5)
        for _ in range(2):
            wan(pipe, num_inference_steps=8)
            assert [each.partition(";")[0] for each in handle.report.fallbacks] == [said]
        assert handle.report.nothing_sparse is None
        assert {record.transformer for record in handle.report.steps} == {"transformer"}


@pytest.mark.slow
def test_a_transformer_compiled_as_a_whole_afterwards_outlives_disable(pipe):
    expected = wan(pipe)
    with chipsparse.enable(pipe, CONFIG) as handle:
        pipe.transformer = torch.compile(pipe.transformer, backend="eager")
        wan(pipe)
        assert handle.report.nothing_sparse is None
    assert torch.equal(wan(pipe), expected)
