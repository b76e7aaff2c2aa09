"""What a family says of an unloaded model, and what a reader says of a result."""

from dataclasses import dataclass, fields
from types import SimpleNamespace

import pytest
import torch

from chipsparse.pipelines.call_reader import CallReader
from chipsparse.pipelines.families.flux import FLUX2, Flux2Reader
from chipsparse.pipelines.family_facts import GuidanceFacts, Sharing, TextPlace
from chipsparse.pipelines.registry import FAMILIES
from chipsparse.pipelines.token_order import TokenOrder


@pytest.mark.parametrize(
    ("facts", "pipe", "arguments", "expected"),
    [
        pytest.param(GuidanceFacts(), {}, {"guidance_scale": 2.0}, True, id="by the scale"),
        pytest.param(GuidanceFacts(), {}, {"guidance_scale": 1.0}, False, id="a scale of 1"),
        pytest.param(GuidanceFacts(), {}, {}, False, id="no scale"),
        pytest.param(
            GuidanceFacts(),
            {"do_classifier_free_guidance": False},
            {"guidance_scale": 2.0},
            False,
            id="the pipeline tells",
        ),
        pytest.param(
            GuidanceFacts("true_cfg_scale"),
            {},
            {"true_cfg_scale": 2.0},
            False,
            id="nothing to guide away from",
        ),
        pytest.param(
            GuidanceFacts("true_cfg_scale"),
            {},
            {"true_cfg_scale": 2.0, "negative_prompt": ""},
            True,
            id="an empty negative prompt",
        ),
        pytest.param(GuidanceFacts(None), {}, {"guidance_scale": 2.0}, False, id="never"),
    ],
)
def test_whether_a_pipeline_guides(facts, pipe, arguments, expected):
    assert facts.is_guided(SimpleNamespace(**pipe), arguments) is expected


@pytest.mark.parametrize(
    ("sharing", "expected"),
    [
        (Sharing(tokens=True), None),
        (Sharing(why_whole="whole"), "whole"),
        (Sharing(tokens=True, why_not=lambda config: config["why"]), "config"),
        (Sharing(why_whole="whole", why_not=lambda config: config["why"]), "config"),
    ],
)
def test_why_tokens_are_not_shared(sharing, expected):
    family = type(FLUX2)(transformer_class="Any", title="", sharing=sharing)
    assert family.why_not_split({"why": "config"}) == expected


@pytest.mark.parametrize("where", ["first", "last", "cross-attention"])
def test_text_counts_where_it_is_in_the_sequence(where):
    text = TextPlace(
        where,
        planned=lambda tokens, latents: tokens + latents[0],
        counted=lambda config, grids, tokens: 2 * tokens,
    )
    config = {"num_layers": 3, "num_attention_heads": 2, "attention_head_dim": 8, "patch_size": 2}
    family = type(FLUX2)(transformer_class="Any", title="", text=text)
    layout = family.planned_layout(config, latents=(5, 8, 6), text_tokens=10)
    assert layout.grids == ((5, 4, 3),)
    assert layout.text_tokens == (0 if where == "cross-attention" else 30)
    assert layout.text_first is (where == "first")
    (kind,) = layout.kinds
    assert (kind.layers, kind.intermediate_size, layout.channels) == (3, 64, 16)


def test_a_family_has_at_most_two_small_classes():
    for family in FAMILIES.values():
        for base, own in ((CallReader, family.reader), (TokenOrder, family.tokens)):
            assert issubclass(own, base)
            between = own.__mro__[: own.__mro__.index(base)]
            assert len(between) <= 2, own
            assert all(len(each.__bases__) == 1 for each in between), own


@dataclass
class Output:
    """As FLUX.2 returns it at its first call."""

    sample: torch.Tensor
    kv_cache: object = None


def test_a_cache_that_one_call_returns_is_not_given_again():
    repeated = Flux2Reader.repeated
    sample = torch.ones(2)
    assert repeated(None, (sample, object())) == (sample,)
    assert repeated(None, (sample,)) == (sample,)
    given = repeated(None, Output(sample, object()))
    assert [getattr(given, field.name) for field in fields(given)] == [sample, None]
    plain = Output(sample)
    assert repeated(None, plain) is plain
