"""Sessions without a model around them: tensors by a seed, through every layer of a call."""

import torch
import torch.nn.functional as F

from chipsparse import SparsityConfig
from chipsparse.config import Action
from chipsparse.layout import LayerKind, ModelLayout
from chipsparse.report.generation import GenerationReport
from chipsparse.skip.position import Place
from chipsparse.skip.session import CallForm, SkipSession
from chipsparse.sparse.cache.host_memory import HostMemory
from chipsparse.sparse.cache.memory_plan import MemoryDemand
from chipsparse.sparse.cache.offload import OffloadPool
from chipsparse.sparse.layers.mlp_weights import MLPWeights
from chipsparse.sparse.session import Reading, SparseSession

CPU = torch.device("cpu")
ACTIONS = ["dense", "refresh", "sparse", "sparse", "skip", "dense", "sparse", "refresh", "sparse"]
CONFIG = SparsityConfig().override(
    {
        "attention.density": 0.2,
        "mlp.density": 0.3,
        "block_size": 16,
        "tile": None,
        "schedule.actions": ACTIONS,
    },
)
HOSTED = {"memory.offload": "always"}
TOTAL = len(ACTIONS) + 1  # after the last step nothing would be left to look at
BOTH = MemoryDemand(branches=2)


class Session:
    """Both sessions of a transformer, called as the code around a model calls them."""

    def __init__(self, *args, **kwargs):
        self.skip = SkipSession()
        self.sparse = SparseSession(*args, **kwargs)

    def begin(self, place, layout, device, demand=MemoryDemand, *, conditioning=None, **reading):
        """The open call, as layers are handed it."""
        plan = self.sparse.plan_for(place, layout)
        self.schedule = plan.schedule
        form = CallForm((layout.without_prompts, place.steps), (layout, place.steps))
        self.decision = self.skip.begin(place, form, self.schedule, conditioning)
        return self.sparse.begin(self.decision, plan, Reading(layout, device, demand, **reading))

    def skipped_output(self):
        return self.decision.output

    def end(self, output, *, is_last_branch=False):
        action = self.sparse.state.action
        self.sparse.end(output.device)
        decision = self.decision
        self.decision = None  # its output is the caller's alone
        over = self.skip.end(
            decision,
            self.schedule,
            action,
            output,
            is_last_branch=is_last_branch,
        )
        self.sparse.finish(over)

    def reset(self, **kwargs):
        self.skip.reset()
        self.sparse.reset(**kwargs)

    def __getattr__(self, name):
        return getattr(self.sparse, name)


def layout_of(grid=(3, 4, 5), batch=1, text_tokens=3):
    kinds = LayerKind("double", 2, 24, mlp_sees_text=False), LayerKind("single", 2, 40)
    return ModelLayout(kinds, 2, 8, batch, (grid,), text_tokens)


def weights_of(layer, width):
    generator = torch.Generator().manual_seed(layer)
    up, down = (torch.randn(*shape, generator=generator) for shape in ((width, 16), (16, width)))
    return MLPWeights(up, None, down, None, "gelu")


def model_attention(query, key, value, scale):
    return F.scaled_dot_product_attention(query, key, value, scale=scale)


def attend(session, layer, *tensors):
    run = session.attention[layer]
    return run(session.state, *tensors, scale=None, unpatched=model_attention)


def call(session, context, layout):
    """One transformer call; returns the outputs of its layers, attention before feed-forward."""
    outputs = []
    for layer in range(layout.layers):
        generator = torch.Generator().manual_seed(10 * context.step + layer)
        shape = (layout.batch, 2, layout.tokens, 8)
        query, key, value = torch.randn(3, *shape, generator=generator)
        if context.branch == "uncond":
            query = query + 1
        outputs.append(attend(session, layer, query, key, value))
        hidden = torch.randn(layout.batch, layout.mlp_tokens(layer), 16, generator=generator)
        weights = weights_of(layer, layout.kind(layer).intermediate_size)
        outputs.append(session.mlp[layer](session.state, hidden, weights))
    return outputs


def step_of(session, context, layout, demand=None):
    """The outputs of one call from its begin to its end; none of a skipped one."""
    state = session.begin(context, layout, CPU, *([] if demand is None else [lambda: demand]))
    outputs = [] if state.action is Action.SKIP else call(session, context, layout)
    session.end(outputs[-1] if outputs else session.skipped_output())
    return outputs


def generate(session, *, generation=1, layout=None, branches=("cond", "uncond"), known=2, steps=9):
    """The outputs of all layers and calls of a generation."""
    outputs = []
    for step in range(steps):
        for branch in branches:
            context = Place(generation, step, branch, TOTAL)
            demand = MemoryDemand(branches=known)
            outputs += step_of(session, context, layout or layout_of(), demand)
    return outputs


def session_with(overrides=(), make_pool=OffloadPool, **options):
    report = GenerationReport()
    pool = make_pool(HostMemory(), report.add, **options)
    return Session(CONFIG.override(dict(overrides)), report, pool)


def equal(first, second):
    return all(torch.equal(*pair) for pair in zip(first, second, strict=True))
