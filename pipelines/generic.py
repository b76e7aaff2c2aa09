"""Models without an adapter of their own: what can be seen of them from outside runs sparse.

What an adapter knows of its model is observed here, in a call that runs unpatched: which attention
modules let diffusers' dispatcher compute, whether a tag comes through as their mask, and how long
their sequences are. The ones with the longest sequence run sparse; everything else stays as it is.
"""

from __future__ import annotations

import contextlib
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from chipsparse.cache.memory_plan import MemoryDemand
from chipsparse.config import Part
from chipsparse.layers.attention import Unpatched
from chipsparse.layers.state import StepState
from chipsparse.layout import LayerKind, ModelLayout
from chipsparse.pipelines.adapter import ModelAdapter
from chipsparse.pipelines.bridge import LayerCall, attention_backend, forward_arguments, make_tag
from chipsparse.pipelines.feed_forward import FeedForwardSite
from chipsparse.pipelines.patches import TAG, Patches
from chipsparse.pipelines.timesteps import largest, value_passed_as
from chipsparse.plan import SparsityPlan
from chipsparse.step import StepContext

MASK = "attention_mask"
UNKNOWN = -1  # layer number of a module that does not run sparse
MLP_RATIO = 4  # what most models have; only the estimate of the working memory asks
TIMESTEPS = 1000
# What pipelines make of the scheduler's timesteps.
PASSED_AS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    lambda values: values,
    lambda values: values / TIMESTEPS,
    lambda values: 1 - values / TIMESTEPS,
    lambda values: (TIMESTEPS - values) / TIMESTEPS,
    lambda values: TIMESTEPS - values,
)
LARGEST_DIFFERENCE = 1e-2  # between two runs of the same kernel, relative; another mask gives more

AttentionShape = tuple[int, int, int, int]  # samples, tokens, heads, channels of a head
CallShape = tuple[tuple[str, tuple[int, ...]], ...]


@dataclass
class Observation:
    """What one attention module did in an observed call.

    Attributes:
        length: tokens that it sees; those of its input where that is not known.
        calls: how often it ran.
        shape: of query, key and value, None where they differ or are not known.
        obstacle: why it cannot run sparse, None where it can or where it is cross-attention.
    """

    length: int
    calls: int = 1
    shape: AttentionShape | None = None
    obstacle: str | None = None


@dataclass(frozen=True)
class Sites:
    """The attention modules that run sparse in calls of one shape.

    Attributes:
        modules: in the order in which they run.
        shape: of their query, key and value.
        dense: why other modules, which are shorter, stay dense, and how many each time.
    """

    modules: tuple[Any, ...]
    shape: AttentionShape
    dense: tuple[tuple[str, int], ...] = ()


class UnservedModelError(ValueError):
    """A model without an adapter computes its attention in a way that cannot run sparse."""


class GenericAdapter(ModelAdapter):
    """Serves any transformer whose attention goes through diffusers' dispatcher.

    Every generation begins with a call that runs as if nothing were patched, so that a second one
    gives what the first one gave; if nothing is known yet of calls of this shape, it is observed.
    """

    transformer_class = "any other"
    families = "any others whose attention goes through diffusers' dispatcher, without masks"
    sparse_attention = "the longest self-attention, in the model's token order"
    sparse_mlp = "no feed-forward layers"

    # Set before `ModelAdapter.__init__` asks for the modules.
    _sites: Sites | None = None
    _watched: list[AttentionShape | None] | None = None
    _watched_backend: Any = None
    _running_generation: int | None = None

    def self_attentions(self) -> list[Any]:
        """The modules that run sparse in calls of the present shape."""
        return [] if self._sites is None else list(self._sites.modules)

    def feed_forwards(self) -> list[FeedForwardSite]:
        """None: where they are is not known."""
        return []

    @classmethod
    def why_not_split(cls, config: Mapping[str, Any]) -> str:
        """Where its tokens enter and leave is not known."""
        return "chipsparse has no adapter for it that knows where its tokens enter and leave"

    def install_tile_order(self) -> None:
        """Leaves the tokens as they are; prepares every module that might run sparse."""
        self._known: dict[CallShape, Sites] = {}
        self._shapes: set[AttentionShape] = set()  # of this generation
        for module in dispatching_modules(self.transformer):
            self._patches.set_attribute(module, TAG, make_tag(self._number, UNKNOWN))
            self.hook_attention(module)

    def layout(self, arguments: dict[str, Any]) -> ModelLayout:
        """The sizes that were observed; all tokens count as one row of an image."""
        assert self._sites is not None
        return layout_of(self._sites)

    def scheduled_timestep(self, timestep: Any, schedule: Any) -> float:
        """The only value of the schedule that pipelines pass as this timestep, one way or other."""
        found = (value_passed_as(timestep, schedule, change) for change in PASSED_AS)
        return next((value for value in found if value is not None), largest(timestep))

    def notes(self, arguments: dict[str, Any]) -> list[str]:
        """What is not done for a model that is not known."""
        assert self._sites is not None
        config = self.session.config
        if not (config.attention.is_sparse or config.mlp.is_sparse):
            return []
        notes = [limits(type(self.transformer).__name__)]
        notes += [
            f"attention runs dense in {count} other modules: {reason}"
            for reason, count in self._sites.dense
        ]
        if len(self._shapes) > 1:
            sizes = " and ".join(
                f"{batch} x {tokens}" for batch, tokens, *_ in sorted(self._shapes)
            )
            notes.append(
                f"its calls have {sizes} tokens, and what one of them records is forgotten by one "
                "of another size"
            )
        return notes

    def _memory_demand(self, arguments: dict[str, Any]) -> MemoryDemand:
        demand = super()._memory_demand(arguments)
        mlps: list[tuple[int, Part]] = [
            (each, "mlp") for each in range(len(self.self_attentions()))
        ]
        return replace(demand, dense=demand.dense.union(mlps))

    # The first call of a generation.

    def knows(self, context: StepContext, arguments: dict[str, Any]) -> bool:
        """Whether this is a later call of a generation, and of a shape that was observed."""
        sites = self._known.get(call_shape(arguments))
        if sites is None or context.generation != self._running_generation:
            return False
        self._use(sites)
        return True

    def observe(
        self, context: StepContext, arguments: dict[str, Any], forward: Callable[[], Any]
    ) -> Any:
        """Runs a call unpatched and uncompiled, and looks at the attention of an unknown shape.

        Raises:
            UnservedModelError: where no attention can run sparse, with the reason.
        """
        hidden = arguments["hidden_states"]
        if not isinstance(hidden, torch.Tensor):
            raise self._refusal(f"its hidden_states are a {type(hidden).__name__}, not a tensor")
        if context.generation != self._running_generation:
            self.session.reset()
            self._running_generation = context.generation
            self._shapes.clear()
        report, shape = self.session.report, call_shape(arguments)
        with self.outside_of_session(context):
            if shape in self._known:
                result = forward()
            else:
                with self._observed() as observations:
                    result = forward()
                self._known[shape] = self._choose(observations)
        self._use(self._known[shape])
        for note in self.notes(arguments):
            report.note(note)
        if len(self._shapes) > 1:
            report.fall_back("attention runs dense: its calls differ in their tokens")
        self._check_outputs(result, context)
        return result

    def _check_outputs(self, result: Any, context: StepContext) -> None:
        """Refuses to skip steps of a model that returns more than one thing."""
        assert self._sites is not None
        plan = SparsityPlan(self.session.config, layout_of(self._sites), context.steps)
        if plan.schedule.skips_any and (isinstance(result, torch.Tensor) or len(result) != 1):
            raise UnservedModelError(
                f"schedule: a {type(self.transformer).__name__} has no adapter of its own and "
                "returns more than one tensor, so its steps cannot be skipped; use sparse ones"
            )

    def _use(self, sites: Sites) -> None:
        """Leads these modules to our backend, numbered in the order in which they run."""
        self._shapes.add(sites.shape)
        if sites is self._sites:
            return
        self.release_attention()
        for module in self.self_attentions():
            setattr(module, TAG, make_tag(self._number, UNKNOWN))
        self._sites = sites
        for layer, module in enumerate(sites.modules):
            setattr(module, TAG, make_tag(self._number, layer))
        self.claim_attention()

    @contextlib.contextmanager
    def _observed(self) -> Iterator[dict[Any, Observation]]:
        """Observes all modules that might run sparse, in the order in which they run."""
        observations: dict[Any, Observation] = {}

        def look(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if module in observations:
                observations[module].calls += 1
                return
            arguments = {**dict(zip(forward_arguments(module), args, strict=False)), **kwargs}
            observations[module] = self._try_tag(module, arguments, output)

        hooks = Patches()
        try:
            for module in dispatching_modules(self.transformer):
                hooks.add_hook(module.register_forward_hook(look, with_kwargs=True))
            yield observations
        finally:
            hooks.undo()

    def _try_tag(self, module: Any, arguments: dict[str, Any], output: Any) -> Observation:
        """Runs a module once more, with a tag as its mask, and compares."""
        seen = Observation(attended_tokens(arguments))
        if arguments.get(MASK) is not None:
            seen.obstacle = "the model passes attention masks"
            return seen
        if not is_stateless(arguments):
            seen.obstacle = "it is called with an object that may keep keys and values"
            return seen
        processor, patches = module.processor, Patches()
        shapes: list[AttentionShape | None] = []
        self._watched = shapes
        self._watched_backend = getattr(processor, "_attention_backend", None)
        try:
            backend = attention_backend(self._watched_backend)
            patches.set_attribute(processor, "_attention_backend", backend)
            copies = {
                name: value.clone() if isinstance(value, torch.Tensor) else value
                for name, value in arguments.items()
            }
            again = module.forward(**{**copies, MASK: make_tag(self._number, UNKNOWN)})
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever a processor does with a mask of another form
            reason = (str(error).splitlines() or [""])[0]
            seen.obstacle = f"its processor changes attention masks ({reason[:80]})"
            return seen
        finally:
            patches.undo()
            self._watched = self._watched_backend = None
        if len(shapes) != 1:
            seen.obstacle = "its attention mask does not reach diffusers' dispatcher just once"
        elif not are_close(again, output):
            seen.obstacle = "its processor computes something else where there is a mask"
        else:
            (seen.shape,) = shapes
        return seen

    def attention(self, layer: int) -> LayerCall:
        """As `ModelAdapter.attention`, where the shapes are those that were observed."""
        return partial(self._as_observed, layer)

    def _as_observed(
        self,
        layer: int,
        state: StepState | None,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float | None,
        unpatched: Unpatched,
    ) -> torch.Tensor:
        shape = attention_shape(query, key, value)
        if self._watched is not None:
            self._watched.append(shape)
        if layer == UNKNOWN:
            return unpatched(query, key, value, scale)
        if self._sites is not None and shape == self._sites.shape:
            attend = super().attention(layer)
            return attend(state, query, key, value, scale=scale, unpatched=unpatched)
        output = unpatched(query, key, value, scale)
        self.session.report.fall_back(
            f"attention of layer {layer} runs dense: it has {shape or 'other keys'} in place of "
            "the samples, tokens, heads and channels of the first call"
        )
        return output

    def unpatched_backend(self, layer: int) -> Any:
        """As `ModelAdapter.unpatched_backend`, also of a module that is observed."""
        return self._watched_backend if layer == UNKNOWN else super().unpatched_backend(layer)

    def _choose(self, observations: Mapping[Any, Observation]) -> Sites:
        """The modules with the longest sequence, unless one that is longer cannot run sparse."""
        for seen in observations.values():
            if seen.calls > 1 and seen.obstacle is None:
                seen.obstacle = "it runs several times in one call"
        obstacles = {
            module: seen for module, seen in observations.items() if seen.obstacle is not None
        }
        shapes = Counter(
            seen.shape for seen in observations.values() if seen.shape and not seen.obstacle
        )
        if not shapes:
            reasons = Counter(seen.obstacle for seen in obstacles.values())
            raise self._refusal(
                reasons.most_common(1)[0][0] if reasons else "none of it is self-attention"
            )
        shape = max(shapes, key=lambda shape: (shape[1], shapes[shape]))
        for seen in obstacles.values():
            if seen.length >= shape[1]:
                raise self._refusal(seen.obstacle)
        chosen = tuple(
            module
            for module, seen in observations.items()
            if seen.shape == shape and seen.obstacle is None
        )
        dense = Counter(str(seen.obstacle) for seen in obstacles.values())
        return Sites(chosen, shape, tuple(dense.items()))

    def _refusal(self, reason: str | None) -> UnservedModelError:
        name = type(self.transformer).__name__
        return UnservedModelError(
            f"{name} has no adapter of its own, and its attention cannot run sparse without one: "
            f"{reason}; call disable() to run the pipeline as it is"
        )


def limits(transformer_class: str) -> str:
    """What is not done for a model of a class without an adapter."""
    return (
        f"{transformer_class} has no adapter of its own: only its longest attention runs sparse, "
        "with the tokens in the model's order and no text columns kept by rule, and its MLPs run "
        "dense"
    )


def why_not(transformer: Any) -> str | None:
    """Why the model cannot be served, as far as is known without a call; None if it may be."""
    if not isinstance(transformer, torch.nn.Module):
        return "it is no PyTorch module"
    if not {"hidden_states", "timestep"} <= set(forward_arguments(transformer)):
        return "its forward does not take hidden_states and timestep"
    if not dispatching_modules(transformer):
        return "none of its attention passes a mask on to diffusers' dispatcher"
    return None


def dispatching_modules(transformer: torch.nn.Module) -> list[Any]:
    """Attention modules whose processors take a backend and a mask."""
    return [module for module in transformer.modules() if _dispatches(module)]


def _dispatches(module: Any) -> bool:
    processor = getattr(module, "processor", None)
    if processor is None or not hasattr(processor, "_attention_backend"):
        return False
    call = processor.forward if isinstance(processor, torch.nn.Module) else processor.__call__
    return all(MASK in inspect.signature(taken).parameters for taken in (call, module.forward))


def attention_shape(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> AttentionShape | None:
    """Samples, tokens, heads and channels of ``[B, H, N, D]``; None where they differ."""
    if not query.shape == key.shape == value.shape:
        return None
    batch, heads, tokens, head_dim = query.shape
    return batch, tokens, heads, head_dim


def layout_of(sites: Sites) -> ModelLayout:
    """Sizes of a call; where text or rows of an image are is not known."""
    batch, tokens, heads, head_dim = sites.shape
    kind = LayerKind("attention", len(sites.modules), MLP_RATIO * heads * head_dim)
    return ModelLayout((kind,), heads, head_dim, batch, grids=((1, 1, tokens),))


def call_shape(arguments: Mapping[str, Any]) -> CallShape:
    """The shapes of all tensors that the transformer is called with."""
    return tuple(
        (name, tuple(value.shape))
        for name, value in sorted(arguments.items())
        if isinstance(value, torch.Tensor)
    )


def attended_tokens(arguments: Mapping[str, Any]) -> int:
    """Tokens that an attention module sees: as many as its mask has, else those of its input."""
    mask = arguments.get(MASK)
    if isinstance(mask, torch.Tensor):
        return mask.shape[-1]
    hidden = arguments.get("hidden_states")
    if not isinstance(hidden, torch.Tensor):
        hidden = next((v for v in arguments.values() if isinstance(v, torch.Tensor)), None)
    return 0 if hidden is None or hidden.ndim < 2 else hidden.shape[-2]


def is_stateless(value: Any) -> bool:
    """Whether a value is made of tensors, numbers and texts: nothing that a call could add to."""
    if isinstance(value, Mapping):
        return all(is_stateless(part) for part in value.values())
    if isinstance(value, tuple | list):
        return all(is_stateless(part) for part in value)
    return value is None or isinstance(value, torch.Tensor | str | float | int | torch.dtype)


def are_close(found: Any, expected: Any) -> bool:
    """Whether two outputs hold the same tensors, but for rounding."""
    if isinstance(expected, tuple | list):
        return len(found) == len(expected) and all(map(are_close, found, expected))
    if not isinstance(expected, torch.Tensor):
        return found is expected
    if found.shape != expected.shape:
        return False
    difference = (found - expected).float().norm()
    return bool(difference <= LARGEST_DIFFERENCE * expected.float().norm())
