"""Compiles what diffusers' cache hooks call, and counts how often they call it.

A hook takes the place of a module's ``forward`` and keeps Python state. Compiled together with its
block it would be compiled anew at every step, or not at all. So the forward beneath it is compiled,
and the hook itself runs as written: it costs what it should, and nothing that it calls is slower
than in the stock model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks.equal_work.methods import Entry
from benchmarks.equal_work.work import attention_of, blocks_of, counted
from chipsparse.pipelines.diffusers_caches import CacheRun, cached

Forward = Callable[..., Any]


@contextmanager
def with_cache(
    run: CacheRun,
    entry: Entry,
    made: Counter[torch.nn.Module],
    compiled: Callable[[Forward], Forward],
) -> Iterator[list[str]]:
    """Puts an entry's cache on the transformer for the time being.

    Args:
        run: has the pipeline.
        entry: has a cache.
        made: gets how often each part of the transformer was computed, complete at the end.
        compiled: compiles a forward, or returns it as it is.

    Yields:
        what diffusers warns of.
    """
    head, blocks = run.pipe.transformer.proj_out, blocks_of(run.pipe.transformer)
    attentions = [attention_of(block) for block in blocks]
    compiled_blocks = {block: block._compiled_call_impl for block in blocks}
    hooked = [*blocks, head, *(attentions if entry.reuses_attention else [])]
    try:
        for block in blocks:
            block._compiled_call_impl = None  # it would go through the hooks
        for module in hooked:
            beneath = module.forward if module is head else compiled(module.forward)
            module.forward = counted(module, beneath, made)
        with cached(run, entry.cache) as warnings:
            if entry.reuses_attention:
                for attention in attentions:  # so that its block's code ends before it
                    attention.forward = torch.compiler.disable(attention.forward)
            yield warnings
    finally:
        for block, call in compiled_blocks.items():
            block._compiled_call_impl = call
        for module in hooked:
            vars(module).pop("forward", None)
        if not entry.reuses_attention:
            made.update({a: made[b] for a, b in zip(attentions, blocks, strict=True)})
