"""diffusers' caches on a pipeline and off again."""

import logging

import pytest
import torch

from chipsparse.experiments.diffusers_caches import CacheRun, cached, mag, sea
from chipsparse.pipelines.diffusers_hooks import hooks_of
from tests.tiny_models import tiny_wan_pipeline


class Unknown(torch.nn.Module):
    """A block of a class that diffusers has no registration of."""


@pytest.mark.parametrize("cache", [mag(0.06, 3), sea(0.25, 2)], ids=lambda cache: cache.method)
def test_a_cache_that_cannot_be_put_on_leaves_no_hook(cache):
    pipe = tiny_wan_pipeline()
    pipe.transformer.blocks[-1] = Unknown()
    with pytest.raises(ValueError, match="Unknown"), cached(CacheRun(pipe, 4, (1.0,) * 4), cache):
        pass
    assert not list(hooks_of(pipe.transformer))
    assert not pipe.transformer.is_cache_enabled


def test_what_the_hooks_warn_of_is_kept_and_nothing_else():
    pipe = tiny_wan_pipeline()
    hooks, pipelines = (logging.getLogger(f"diffusers.{name}.x") for name in ("hooks", "pipelines"))
    with cached(CacheRun(pipe, 4), sea(0.25, 2)) as warnings:
        for _ in range(2):
            hooks.warning("nothing to go by")
        pipelines.warning("cut: a secret prompt")
    hooks.warning("afterwards")
    assert warnings == ["nothing to go by"]
