"""The report of whole pipelines: which transformer, which layers the model computes itself."""

import json

import pytest
import torch

import chipsparse
from chipsparse import FallbackError
from tests.pipelines.model_state import state_of
from tests.pipelines.test_layer_budgets import CONFIG, MODELS, generate
from tests.tiny_models import tiny_chroma_pipeline, tiny_wan_pipeline

BY_PROFILE = "attention.enabled is false"


@pytest.fixture
def pipe():
    return tiny_wan_pipeline()


def wan(pipe, **arguments):
    return generate(pipe, num_frames=5, guidance_scale=1.0, **arguments)


@pytest.mark.parametrize("name", MODELS)
def test_every_layer_of_every_model(name):
    make, layers, arguments = MODELS[name]
    pipe = make()
    with chipsparse.enable(pipe, CONFIG, layer_times=True) as handle:
        generate(pipe, **arguments)
        data = handle.report.to_dict()
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert data["pipeline"] == {"class": type(pipe).__name__, "location": None}
    names = {"transformer", "transformer_2"} if "experts" in name else {"transformer"}
    assert set(data["transformers"]) == {step["transformer"] for step in data["steps"]} == names
    for each in data["transformers"].values():
        assert each["class"] == type(pipe.transformer).__name__
        assert each["layout"]["layers"] == layers
    masked = "chroma" in name
    for step in data["steps"]:
        found = [(entry["layer"], entry["part"]) for entry in step["layers"]]
        assert found == [(layer, part) for layer in range(layers) for part in ("attention", "mlp")]
        for entry in step["layers"]:
            if masked and entry["part"] == "attention":
                assert entry["reason"] == "the pipeline passes an attention mask"
                assert (entry["backend"], entry["action"]) == ("model", "dense")
                assert entry["seconds"] is None
            else:
                assert (entry["reason"], entry["action"]) == (None, step["action"])
                assert entry["seconds"] > 0
                assert (entry["kept"] < 1) == (step["action"] == "sparse")
    sparse = {step["step"] for step in data["steps"] if step["action"] == "sparse"}
    assert data["totals"]["steps"]["sparse"] == len(sparse) > 0


def test_what_the_model_computes_by_itself_has_its_reason(pipe):
    class Adapted(torch.nn.Linear):
        pass

    pipe.transformer.blocks[1].ffn.net[2].__class__ = Adapted
    config = CONFIG.override({"attention.enabled": False})
    with chipsparse.enable(pipe, config) as handle:
        wan(pipe)
    reason = "its second linear is of class Adapted (an adapter, or quantized)"
    for record in handle.report.steps:
        found = {(entry.layer, entry.part): entry for entry in record.layers}
        assert [found[layer, "attention"].reason for layer in range(3)] == [BY_PROFILE] * 3
        assert [found[layer, "mlp"].reason for layer in range(3)] == [None, reason, None]
        assert found[1, "mlp"].backend == "model"


def test_an_exception_in_the_model_is_reported(pipe):
    calls = []

    def breaks(*_):
        calls.append(1)
        if len(calls) == 3:
            raise ValueError("at the third call")

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


# Strict.


def adapted(pipe):
    class Adapted(torch.nn.Linear):
        pass

    pipe.transformer.blocks[1].ffn.net[2].__class__ = Adapted


def other_processors(pipe):
    for block in pipe.transformer.blocks:
        block.attn1.set_processor(type(block.attn1.processor)())


def no_tags(pipe):
    """As if the model passed a mask of its own, which nobody foresaw."""
    for block in pipe.transformer.blocks:
        block.attn1._forward_pre_hooks.clear()
        block.attn1._forward_pre_hooks_with_kwargs.clear()


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
        session = handle._adapters[0].session
        assert (session.plan, session.cache_bytes()) == (None, 0)
    handle.disable()
    assert torch.equal(wan(pipe), dense)


def test_a_strict_run_goes_on_when_the_cause_is_gone(pipe):
    linear = pipe.transformer.blocks[1].ffn.net[2]
    with chipsparse.enable(pipe, CONFIG) as handle:
        expected = wan(pipe)
    before = state_of(pipe.transformer)
    with chipsparse.enable(pipe, CONFIG, strict=True) as handle:
        hook = linear.register_forward_hook(lambda *_: None)
        with pytest.raises(FallbackError, match="hooks of its own"):
            wan(pipe)
        hook.remove()
        assert torch.equal(wan(pipe), expected)
        assert (handle.report.fallbacks, handle.report.error) == ([], None)
    assert state_of(pipe.transformer) == before


def test_a_mask_ends_a_strict_run_unless_attention_is_dense_by_config():
    pipe = tiny_chroma_pipeline()
    with (
        chipsparse.enable(pipe, CONFIG, strict=True),
        pytest.raises(FallbackError, match=r"^attention runs dense: the pipeline passes an atten"),
    ):
        generate(pipe)
    config = CONFIG.override({"attention.enabled": False})
    with chipsparse.enable(pipe, config, strict=True) as handle:
        generate(pipe)
    assert handle.report.steps[-1].mlp_kept is not None


def test_recording_gradients_is_a_fallback(pipe):
    latents = torch.zeros(1, 4, 2, 4, 4)
    arguments = {
        "timestep": torch.tensor([500.0]),
        "encoder_hidden_states": torch.zeros(1, 4, 32),
        "return_dict": False,
    }
    with chipsparse.enable(pipe, CONFIG) as handle:
        pipe.transformer(latents, **arguments)
        assert handle.report.fallbacks == ["everything runs dense: gradients are recorded"]
    with (
        chipsparse.enable(pipe, CONFIG, strict=True),
        pytest.raises(FallbackError, match="gradients are recorded"),
    ):
        pipe.transformer(latents, **arguments)
