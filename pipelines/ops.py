"""Custom ops, by which a model's layers reach who serves them, and one attention backend.

diffusers hands q, k and v to an attention backend but tells it neither layer nor step. So every
patched module carries a *tag*, a small integer tensor with the numbers of its server and layer,
which travels as the (otherwise unused) attention mask, or on a processor that takes no mask. A
tensor rather than a Python number: under ``torch.compile`` it is an input and not a guard, and one
graph serves all blocks. The state sits behind the custom ops, outside the graph, and so do the
weights of feed-forward layers, which these ops fetch by the tag.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import weakref
from collections.abc import Callable
from inspect import Parameter
from typing import Any, Protocol, TypeVar

import torch
from diffusers.models import attention_dispatch

from chipsparse.pipelines.feed_forward import autocast
from chipsparse.pipelines.patches import TAG
from chipsparse.sparse.layers.state import LayerCall
from chipsparse.sparse.session import SparseSession

T = TypeVar("T", bound=Callable[..., torch.Tensor])

BACKEND_NAME = "chipsparse"
ANY = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD, Parameter.KEYWORD_ONLY)

# What the ops do differs from step to step, so a CUDA graph must not record them.
STATEFUL = (torch.Tag.cudagraph_unsafe,)

# What PyTorch asks for first where ``torch.autocast`` is on for tensors of these devices.
AUTOCAST_KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}

_library = torch.library.Library("chipsparse", "FRAGMENT")


def _operation(fake: Callable[..., torch.Tensor]) -> Callable[[T], T]:
    """Makes a function an op; ``fake`` returns an empty tensor like its result.

    ``torch.library.custom_op`` does the same and looks after gradients and aliases besides, at
    twenty times the cost of a call. These ops run without gradients, and return new tensors.
    """

    def register(function: T) -> T:
        name = function.__name__
        schema = torch.library.infer_schema(function, mutates_args=())
        _library.define(name + schema, tags=STATEFUL)
        _library.impl(name, function, "CompositeExplicitAutograd")
        for device_type, key in AUTOCAST_KEYS.items():
            _library.impl(name, _under_autocast(function, device_type), key)
        torch.library.register_fake(f"chipsparse::{name}", fake, lib=_library)
        return function

    return register


def _under_autocast(
    function: Callable[..., torch.Tensor],
    device_type: str,
) -> Callable[..., torch.Tensor]:
    """An op under ``torch.autocast``: its tensors, and weights that it fetches, get one dtype."""
    fetches = "dtype" in inspect.signature(function).parameters

    def call(*args: Any) -> torch.Tensor:
        dtype = torch.get_autocast_dtype(device_type)
        cast = [
            autocast(item, dtype)
            if isinstance(item, torch.Tensor) and item.device.type == device_type
            else item
            for item in args
        ]
        with torch.autocast(device_type, enabled=False):
            op = getattr(torch.ops.chipsparse, function.__name__)
            return op(*cast, dtype) if fetches else op(*cast)

    return call


class LayerServer(Protocol):
    """The members that the ops use of an object that serves the layers of a transformer."""

    session: SparseSession
    patch: Any  # has what computes a layer as diffusers made it, and its weights
    is_calling: bool  # a call of the transformer is under way

    def called_outside(self) -> None:
        """Report layers that compute while the transformer is not called."""

    def attention(self, layer: int) -> LayerCall:
        """Return the self-attention of a layer."""


# Custom ops take tensors and numbers only, so an op finds its server by number. The map holds no
# server alive and is empty unless something is patched.
_servers: weakref.WeakValueDictionary[int, LayerServer] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


def register_server(server: LayerServer) -> int:
    """Give a server the number under which the ops find it."""
    number = next(_numbers)
    _servers[number] = server
    return number


def make_tag(server_number: int, layer: int) -> torch.Tensor:
    """The tag of one layer: int64 ``[2]`` on the CPU."""
    return torch.tensor([server_number, layer], device="cpu")


def _find(tag: torch.Tensor) -> tuple[LayerServer, int]:
    number, layer = tag.tolist()
    server = _servers.get(number)
    if server is None:
        raise RuntimeError(
            "a copy of a layer that chipsparse had patched is called after its model was restored; "
            "make the copy after chipsparse.disable(pipe)",
        )
    if server.session.state is None and not server.is_calling:
        server.called_outside()
    return server, layer


@_operation(lambda query, *_: query.new_empty(query.shape))
def self_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tag: torch.Tensor,
    scale: float | None,
) -> torch.Tensor:
    """Self-attention of the tagged layer; all tensors ``[B, N, H, D]``, the result contiguous."""
    server, layer = _find(tag)
    attend = server.attention(layer)
    tensors = (states.transpose(1, 2) for states in (query, key, value))
    unpatched = functools.partial(server.patch.unpatched_attention, layer)
    output = attend(server.session.state, *tensors, scale=scale, unpatched=unpatched)
    return output.transpose(1, 2).contiguous()


@_operation(lambda hidden, *_: hidden.new_empty(hidden.shape))
def feed_forward(
    hidden: torch.Tensor,
    tag: torch.Tensor,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Feed-forward layer of the tagged block, from and to ``[B, N, C]``."""
    server, layer = _find(tag)
    weights = server.patch.sites[layer].weights(dtype)
    return server.session.mlp[layer](server.session.state, hidden, weights).contiguous()


@_operation(lambda hidden, _, channels, *__: hidden.new_empty((*hidden.shape[:-1], channels)))
def parallel_feed_forward(
    hidden: torch.Tensor,
    tag: torch.Tensor,
    channels: int,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Feed-forward layer beside the attention of the tagged block, and their common projection.

    `hidden` is the attention output ``[B, N, A]`` and the layer's input ``[B, N, C]``, side by
    side; C is `channels`, also of the result. With weights in FP8, the attention's part and the
    neurons are rounded apart, where the model rounds them as one row.
    """
    server, layer = _find(tag)
    session = server.session
    width = hidden.shape[-1] - channels
    site: Any = server.patch.sites[layer]
    weights, projection, bias = site.parallel_weights(width, dtype)
    attention = hidden[..., :width]
    own = hidden[..., width:]

    def project() -> torch.Tensor:
        # As rows of one matrix: for others a linear adds its bias by another pass over the result.
        projected = weights.linear(attention.flatten(0, -2), projection, bias)
        return projected.unflatten(0, hidden.shape[:-1])

    return session.mlp[layer](session.state, own, weights, addend=project).contiguous()


def attention_backend(other: Any = None) -> Any:
    """The member of diffusers' ``AttentionBackendName`` that is routed to `self_attention`.

    Added to the Enum on first use; diffusers looks backends up there and nowhere else. The other
    backend, None for the one that is active in diffusers, computes what our op does not.
    """
    names = attention_dispatch.AttentionBackendName
    over = None if other is None else names(other)
    value = BACKEND_NAME if over is None else f"{BACKEND_NAME}_over_{over.value}"
    if value not in names._value2member_map_:
        member = str.__new__(names, value)
        member._name_ = value.upper()
        member._value_ = value
        member.is_chipsparse = True
        names._member_map_[member._name_] = member
        names._member_names_.append(member._name_)
        names._value2member_map_[value] = member
        attention_dispatch._AttentionBackendRegistry.register(member)(_dispatcher(over))
    return names._value2member_map_[value]


def is_claimed(module: Any) -> bool:
    """Return whether an attention module is routed to our op now: never under gradients."""
    backend = getattr(module.processor, "_attention_backend", None)
    ours = getattr(backend, "is_chipsparse", False)  # as compiled code can ask
    return ours and not torch.is_grad_enabled()


def forward_arguments(module: torch.nn.Module) -> tuple[str, ...]:
    """The names of the arguments of the ``forward`` of a module's class, in order.

    If it takes any and hands them on, they have the names of the class below.
    """
    original: Any = getattr(module, "_orig_mod", module)  # of a compiled one
    names: dict[str, None] = {}
    for model_class in type(original).__mro__:
        forward = vars(model_class).get("forward")
        if forward is None:
            continue
        parameters = [*inspect.signature(forward).parameters.values()][1:]
        open_ended = {item.name for item in parameters if item.kind in ANY}
        names |= {item.name: None for item in parameters if item.name not in open_ended}
        if not open_ended:
            return tuple(names)
    wrapped = getattr(original, "original_module", None)  # by PEFT, which hands all on to a copy
    return forward_arguments(wrapped) if isinstance(wrapped, torch.nn.Module) else tuple(names)


@functools.cache  # one hook for all blocks of a kind: compiled ones share one graph
def tagging_hook(names: tuple[str, ...], *, over_masks: bool) -> Callable[..., Any]:
    """A forward pre-hook of attention modules with these `forward_arguments`: passes their tag.

    It is the ``attention_mask``; see `AttentionFacts.tags_over_masks` for calls that have one.
    """

    def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not is_claimed(module):
            return None
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        if arguments.get("attention_mask") is not None and not over_masks:
            return None
        return args[len(names) :], {**arguments, "attention_mask": getattr(module, TAG)}

    return hook


def _dispatcher(over: Any) -> Callable[..., torch.Tensor]:
    """The function that diffusers calls for a patched attention module as its backend."""

    def dispatched(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        _parallel_config: Any = None,
    ) -> torch.Tensor:
        tag, attn_mask = _read_tag(
            attn_mask,
            _parallel_config,
            other_kind=is_causal or dropout_p > 0,
        )
        if tag is not None:
            if enable_gqa:  # our kernels want a key for each head of the queries
                shared = query.shape[2] // key.shape[2]
                key, value = (states.repeat_interleave(shared, dim=2) for states in (key, value))
            return torch.ops.chipsparse.self_attention(query, key, value, tag, scale)
        return attention_dispatch.dispatch_attention_fn(
            query,
            key,
            value,
            attn_mask,
            dropout_p,
            is_causal,
            scale,
            enable_gqa,
            backend=over,
        )

    return dispatched


def _read_tag(
    mask: torch.Tensor | None,
    parallel_config: Any,
    *,
    other_kind: bool,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The tag of a call and its mask; no tag where the call is not for our op."""
    if isinstance(parallel_config, torch.Tensor):
        tag = parallel_config
        ours = mask is None and not torch.is_grad_enabled()
    elif parallel_config is not None:
        raise ValueError(
            "enable_parallelism() was called on a patched transformer; call it before "
            "chipsparse.enable()",
        )
    elif mask is not None and mask.dtype == torch.int64 and mask.ndim == 1:
        tag = mask
        mask = None
        ours = True
    else:
        return None, mask
    return (tag if ours and not other_kind else None), mask
