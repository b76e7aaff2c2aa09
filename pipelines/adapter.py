"""The part of patching that all models share: position, tags, feed-forward layers, restoring.

A model's adapter names its modules and reads its sizes; everything that is changed on the model is
changed here, through `Patches`, which takes all of it back.

The transformer gets another class at run time, a subclass of its own that wraps ``__call__``.
Unlike a diffusers hook, which replaces the instance's ``forward``, this survives hooks that come
and go around it: accelerate's model offload takes its hooks off and on again after every
generation and restores the ``forward`` of an earlier time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from diffusers.models import attention_dispatch

from chipsparse.layout import ModelLayout
from chipsparse.mlp import MLPWeights
from chipsparse.pipelines.bridge import (
    BACKEND_NAME,
    attention_backend,
    make_tag,
    register_host,
)
from chipsparse.plan import Action
from chipsparse.session import Session
from chipsparse.step import PositionTracker

TAG = "chipsparse_tag"
ADAPTER = "chipsparse_adapter"


class Patches:
    """A list of undo steps, taken in reverse."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []
        self._subclasses: dict[tuple[type, type], type] = {}

    def undo(self) -> None:
        """Takes every change back; a second call does nothing."""
        while self._undo:
            self._undo.pop()()

    def set_attribute(self, target: Any, name: str, value: Any) -> None:
        """Sets an instance attribute."""
        had, old = name in vars(target), vars(target).get(name)
        setattr(target, name, value)
        self._undo.append(lambda: setattr(target, name, old) if had else delattr(target, name))

    def set_class(self, target: Any, mixin: type) -> None:
        """Gives an object a subclass of its class with ``mixin`` in front, under the same name."""
        base = type(target)
        if (mixin, base) not in self._subclasses:  # one class for all layers: one compiled graph
            names = {"__module__": base.__module__, "__qualname__": base.__qualname__}
            self._subclasses[mixin, base] = type(base.__name__, (mixin, base), names)
        target.__class__ = self._subclasses[mixin, base]
        self._undo.append(lambda: setattr(target, "__class__", base))

    def add_hook(self, handle: Any) -> None:
        """Takes over a handle that PyTorch returned for a hook."""
        self._undo.append(handle.remove)


class PatchedTransformer:
    """Mixin of a patched transformer: tells its adapter what the pipeline says and does."""

    chipsparse_adapter: ModelAdapter

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Lets the adapter run the call, outside of every hook on the model."""
        return self.chipsparse_adapter.call(super().__call__, args, kwargs)  # type: ignore[misc]

    @contextlib.contextmanager
    def cache_context(self, name: str, **kwargs: Any) -> Iterator[None]:
        """Remembers the branch and step that the pipeline names."""
        adapter = self.chipsparse_adapter
        outer, adapter.named_position = adapter.named_position, {"name": name, **kwargs}
        try:
            with super().cache_context(name, **kwargs):  # type: ignore[misc]
                yield
        finally:
            adapter.named_position = outer

    def _reset_stateful_cache(self, *args: Any, **kwargs: Any) -> None:
        """Called by pipelines when a generation is complete."""
        self.chipsparse_adapter.finish_generation()
        super()._reset_stateful_cache(*args, **kwargs)  # type: ignore[misc]

    def set_attention_backend(self, backend: Any) -> None:
        """Changes the backend under ours: the one that dense attention without records uses."""
        with self.chipsparse_adapter.attention_released():
            super().set_attention_backend(backend)  # type: ignore[misc]

    def reset_attention_backend(self) -> None:
        """As `set_attention_backend`, back to the default."""
        with self.chipsparse_adapter.attention_released():
            super().reset_attention_backend()  # type: ignore[misc]


class PatchedFeedForward:
    """Mixin of a patched ``FeedForward``: runs as one op where its weights can be read."""

    net: Any
    chipsparse_tag: torch.Tensor
    chipsparse_activation: str | None

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Feed-forward for ``[B, N, C]``."""
        if self.chipsparse_activation is None or torch.is_grad_enabled():
            output: torch.Tensor = super().forward(hidden_states, *args, **kwargs)  # type: ignore[misc]
            return output
        up, down = self.net[0].proj, self.net[2]
        return torch.ops.chipsparse.feed_forward(
            hidden_states,
            up.weight,
            up.bias,
            down.weight,
            down.bias,
            self.chipsparse_tag,
            self.chipsparse_activation,
        )


class ModelAdapter:
    """Patches one transformer and serves its layers; `remove` restores it bit for bit.

    Args:
        transformer: the model, of the class that `transformer_class` names.
        session: the state of this transformer.
        tracker: follows the position over all transformers of the pipeline.
        schedule: returns the scheduler's timesteps.
    """

    transformer_class: ClassVar[str]

    def __init__(
        self,
        transformer: torch.nn.Module,
        session: Session,
        tracker: PositionTracker,
        schedule: Callable[[], Any],
    ) -> None:
        self.transformer = transformer
        self.session = session
        self.named_position: dict[str, Any] = {}
        self.other_experts: list[ModelAdapter] = []
        self._tracker = tracker
        self._schedule = schedule
        self._patches = Patches()
        self._attention_patches = Patches()
        self._unpatched_backends: list[Any] = []
        number = register_host(self)
        try:
            self._patches.set_attribute(transformer, ADAPTER, self)
            self._patches.set_class(transformer, PatchedTransformer)
            for layer, module in enumerate(self.self_attentions()):
                self._patches.set_attribute(module, TAG, make_tag(number, layer))
                hook = module.register_forward_pre_hook(self.tag_attention, with_kwargs=True)
                self._patches.add_hook(hook)
            for layer, module in enumerate(self.feed_forwards()):
                self._patches.set_attribute(module, TAG, make_tag(number, layer))
                self._patches.set_attribute(module, "chipsparse_activation", None)
                self._patches.set_class(module, PatchedFeedForward)
            self.claim_attention()
            self.install_token_order()
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Restores the model and frees the caches."""
        self.release_attention()
        self._patches.undo()
        self.session.reset()

    # What a model's adapter says.

    def self_attentions(self) -> list[Any]:
        """The self-attention modules, in layer order; each has a ``processor`` that dispatches."""
        raise NotImplementedError

    def feed_forwards(self) -> list[Any]:
        """The diffusers ``FeedForward`` modules, in layer order."""
        raise NotImplementedError

    def layout(self, arguments: dict[str, Any]) -> ModelLayout:
        """The sizes of a call with these arguments of the transformer's ``forward``."""
        raise NotImplementedError

    def install_token_order(self) -> None:
        """Hooks the places where tokens enter, rotary embeddings are made, and tokens leave."""
        raise NotImplementedError

    @staticmethod
    def tag_attention(
        module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Forward pre-hook of a self-attention module: passes its tag as the attention mask."""
        raise NotImplementedError

    # One transformer call.

    @torch.compiler.disable(recursive=False)
    def call(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """Runs the transformer's own call between `Session.begin` and `Session.end`.

        Where gradients are recorded the model runs as if it were not patched.
        """
        if torch.is_grad_enabled():
            return forward(*args, **kwargs)
        names = ("hidden_states", "timestep", "encoder_hidden_states")
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        hidden, timestep = arguments["hidden_states"], arguments["timestep"]
        context = self._tracker.locate(
            branch=self.named_position.get("name"),
            step_index=self.named_position.get("step_index"),
            steps=self.named_position.get("num_inference_steps"),
            timestep=lambda: float(torch.as_tensor(timestep).max()),
            schedule=self._schedule(),
        )
        for expert in self.other_experts:  # done with for this generation: free its caches
            expert.session.reset()
        try:
            action = self.session.begin(context, self.layout(arguments), hidden.device)
            self._check_layers()
            if action is Action.SKIP:
                output = self.session.last_output()  # end() keeps a copy of its own
                self.session.end(output)
                return self.wrap_output(output, arguments)
            result = forward(*args, **kwargs)
            self.session.end(result[0])
            return result
        except BaseException:
            self.session.reset()
            raise

    def wrap_output(self, output: torch.Tensor, arguments: dict[str, Any]) -> Any:
        """Returns a tensor in the form that the transformer's ``forward`` returns it."""
        raise NotImplementedError

    def finish_generation(self) -> None:
        """Frees the caches and starts anew with the next call."""
        self.session.reset()
        self._tracker.finish()

    # Attention.

    def claim_attention(self) -> None:
        """Leads the self-attention modules to our backend, remembering theirs."""
        self._unpatched_backends = []
        for module in self.self_attentions():
            processor = module.processor
            self._unpatched_backends.append(getattr(processor, "_attention_backend", None))
            self._attention_patches.set_attribute(
                processor, "_attention_backend", attention_backend()
            )

    def release_attention(self) -> None:
        """Gives the self-attention modules their own backends back."""
        self._attention_patches.undo()

    @contextlib.contextmanager
    def attention_released(self) -> Iterator[None]:
        """Gives the self-attention modules back for a while."""
        self.release_attention()
        try:
            yield
        finally:
            self.claim_attention()

    def attention(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float | None,
    ) -> torch.Tensor:
        """Self-attention in diffusers' layout ``[B, N, H, D]``; see `Session.attention`."""

        def unpatched() -> torch.Tensor:
            output: torch.Tensor = attention_dispatch.dispatch_attention_fn(
                query, key, value, scale=scale, backend=self._unpatched_backends[layer]
            )
            return output.transpose(1, 2)

        return self.session.attention(
            layer,
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            scale=scale,
            unpatched=unpatched,
        ).transpose(1, 2)

    # Feed-forward layers.

    def mlp(self, layer: int, hidden: torch.Tensor, weights: MLPWeights) -> torch.Tensor:
        """Feed-forward layer of one block; see `Session.mlp`."""
        return self.session.mlp(layer, hidden, weights)

    # What runs dense although the config asks otherwise.

    def _check_layers(self) -> None:
        """Decides before each call which layers can run sparse, and reports the others."""
        config, caching = self.session.config, self.session.caching
        dense: dict[tuple[str, str], list[int]] = {}
        attentions, feed_forwards = self.self_attentions(), self.feed_forwards()
        for layer, module in enumerate(attentions):
            if caching and config.attention.enabled and not is_claimed(module):
                dense.setdefault(("attention", "its processor was replaced"), []).append(layer)
        for layer, module in enumerate(feed_forwards):
            wanted = caching and config.mlp.enabled
            activation, reason = readable_activation(module) if wanted else (None, None)
            module.chipsparse_activation = activation
            if reason is not None:
                dense.setdefault(("MLP", reason), []).append(layer)
        for (part, reason), layers in dense.items():
            self.session.report.fall_back(
                f"{part} runs dense in {len(layers)} of {len(attentions)} layers "
                f"(first: layer {layers[0]}): {reason}"
            )


def is_claimed(module: Any) -> bool:
    """Whether an attention module leads to our op now.

    It does not where gradients are recorded, nor after somebody replaced its processor.
    """
    backend = getattr(module.processor, "_attention_backend", None)
    return backend == BACKEND_NAME and not torch.is_grad_enabled()


def readable_activation(module: Any) -> tuple[str | None, str | None]:
    """The activation of a diffusers ``FeedForward``, or the reason why it cannot run sparse."""
    first, *_, last = module.net
    names = {"tanh": "gelu-tanh", "none": "gelu"}
    if type(first).__name__ != "GELU" or first.approximate not in names or len(module.net) != 3:
        return None, f"its activation {type(first).__name__} is not supported"
    for name, linear in (("first", first.proj), ("second", last)):
        if type(linear.weight) is not torch.nn.Parameter or not linear.weight.is_floating_point():
            return None, f"the weight of its {name} linear is a {type(linear.weight).__name__}"
        if type(linear) is not torch.nn.Linear:
            return None, (
                f"its {name} linear is of class {type(linear).__name__} (an adapter, or quantized)"
            )
        registry = getattr(linear, "_diffusers_hook", None)
        if hasattr(linear, "_hf_hook") or (registry is not None and registry.hooks):
            return None, f"its {name} linear has hooks of its own (offloading or casting)"
    return names[first.approximate], None
