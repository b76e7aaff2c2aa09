"""The bridge between a model's layers and its adapter: one attention backend, three custom ops.

diffusers hands q, k and v to an attention backend but tells it neither layer nor step. So every
patched module carries a *tag*, a small integer tensor with the numbers of its adapter and layer,
which travels as the (otherwise unused) attention mask, or on a processor that takes no mask. A
tensor rather than a Python number: under ``torch.compile`` it is an input and not a guard, and one
graph serves all blocks. The state sits behind the custom ops, outside the graph.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from diffusers.models import attention_dispatch

from chipsparse.mlp import MLPWeights

BACKEND_NAME = "chipsparse"

# What the ops do differs from step to step, so a CUDA graph must not record them.
STATEFUL = (torch.Tag.cudagraph_unsafe,)

_library = torch.library.Library("chipsparse", "FRAGMENT")


def _operation(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Makes a function an op; its fake, an empty tensor of the right shape, is to be registered.

    ``torch.library.custom_op`` does the same and looks after gradients and aliases besides, at
    twenty times the cost of a call. These ops run without gradients, and return new tensors.
    """
    name = function.__name__
    schema = torch.library.infer_schema(function, mutates_args=())
    _library.define(name + schema, tags=STATEFUL)
    _library.impl(name, function, "CompositeExplicitAutograd")
    return function


def _fake(name: str) -> Any:
    return torch.library.register_fake(f"chipsparse::{name}", lib=_library)


class LayerHost(Protocol):
    """What the ops call: the adapter of a patched transformer."""

    def attention(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float | None,
    ) -> torch.Tensor:
        """Self-attention in diffusers' layout, ``[B, N, H, D]``."""

    def mlp(
        self,
        layer: int,
        hidden: torch.Tensor,
        weights: MLPWeights,
        addend: Callable[[], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Feed-forward layer for ``[B, N, C]``, plus an addend; see `Session.mlp`."""


# Custom ops take tensors and numbers only, so an op finds its adapter by number. The map holds no
# adapter alive and is empty unless something is patched.
_hosts: weakref.WeakValueDictionary[int, LayerHost] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


def register_host(host: LayerHost) -> int:
    """Gives an adapter the number under which the ops find it."""
    number = next(_numbers)
    _hosts[number] = host
    return number


def make_tag(host_number: int, layer: int) -> torch.Tensor:
    """The tag of one layer: int64 ``[2]`` on the CPU."""
    return torch.tensor([host_number, layer])


def _find(tag: torch.Tensor) -> tuple[LayerHost, int]:
    number, layer = tag.tolist()
    host = _hosts.get(number)
    if host is None:
        raise RuntimeError(
            "a copy of a layer that chipsparse had patched is called after its model was restored; "
            "make the copy after chipsparse.disable(pipe)"
        )
    return host, layer


@_operation
def self_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tag: torch.Tensor,
    scale: float | None,
) -> torch.Tensor:
    """Self-attention of the tagged layer; all tensors ``[B, N, H, D]``, the result contiguous."""
    host, layer = _find(tag)
    return host.attention(layer, query, key, value, scale).contiguous()


@_fake("self_attention")
def _(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tag: torch.Tensor,
    scale: float | None,
) -> torch.Tensor:
    return query.new_empty(query.shape)


@_operation
def feed_forward(
    hidden: torch.Tensor,
    up: torch.Tensor,
    up_bias: torch.Tensor | None,
    down: torch.Tensor,
    down_bias: torch.Tensor | None,
    tag: torch.Tensor,
    activation: str,
    gate: str,
) -> torch.Tensor:
    """Feed-forward layer of the tagged block; see `MLPWeights.from_linears` for the weights."""
    host, layer = _find(tag)
    weights = MLPWeights.from_linears(up, up_bias, down, down_bias, activation, gate)
    return host.mlp(layer, hidden, weights).contiguous()


@_fake("feed_forward")
def _(
    hidden: torch.Tensor,
    up: torch.Tensor,
    up_bias: torch.Tensor | None,
    down: torch.Tensor,
    down_bias: torch.Tensor | None,
    tag: torch.Tensor,
    activation: str,
    gate: str,
) -> torch.Tensor:
    return hidden.new_empty((*hidden.shape[:-1], down.shape[0]))


@_operation
def parallel_feed_forward(
    joined: torch.Tensor,
    up: torch.Tensor,
    up_bias: torch.Tensor | None,
    out: torch.Tensor,
    out_bias: torch.Tensor | None,
    tag: torch.Tensor,
    activation: str,
    gate: str,
) -> torch.Tensor:
    """Feed-forward layer beside the attention of the tagged block, and their common projection.

    Args:
        joined: attention output ``[B, N, A]`` and the layer's input ``[B, N, C]``, side by side.
        up: ``[F, C]`` of the first linear, or ``[2 F, C]`` where it is gated; where it is one with
            the attention's projections, their rows stand before.
        up_bias: ``[F]``, like ``up``, or None.
        out: ``[C, A + F]`` of the projection: the attention's columns, then the neurons'.
        out_bias: ``[C]`` or None.
        tag: which layer.
        activation: its activation function.
        gate: see `MLPWeights.from_linears`.

    Returns:
        ``[B, N, C]``.
    """
    host, layer = _find(tag)
    width = joined.shape[-1] - up.shape[1]
    attention, hidden = joined[..., :width], joined[..., width:]
    rows = (out.shape[1] - width) * (1 if gate == "none" else 2)
    up, up_bias = up[-rows:], None if up_bias is None else up_bias[-rows:]
    weights = MLPWeights.from_linears(up, up_bias, out[:, width:], None, activation, gate)

    def project() -> torch.Tensor:
        # As rows of one matrix: for others a linear adds its bias by another pass over the result.
        projected = F.linear(attention.flatten(0, -2), out[:, :width], out_bias)
        return projected.unflatten(0, joined.shape[:-1])

    return host.mlp(layer, hidden, weights, project).contiguous()


@_fake("parallel_feed_forward")
def _(
    joined: torch.Tensor,
    up: torch.Tensor,
    up_bias: torch.Tensor | None,
    out: torch.Tensor,
    out_bias: torch.Tensor | None,
    tag: torch.Tensor,
    activation: str,
    gate: str,
) -> torch.Tensor:
    return joined.new_empty((*joined.shape[:-1], out.shape[0]))


def attention_backend() -> Any:
    """The member of diffusers' ``AttentionBackendName`` that leads to `self_attention`.

    Added to the Enum on first use; diffusers looks backends up there and nowhere else.
    """
    names = attention_dispatch.AttentionBackendName
    if BACKEND_NAME not in names._value2member_map_:
        member = str.__new__(names, BACKEND_NAME)
        member._name_, member._value_ = BACKEND_NAME.upper(), BACKEND_NAME
        names._member_map_[member._name_] = member
        names._member_names_.append(member._name_)
        names._value2member_map_[BACKEND_NAME] = member
        attention_dispatch._AttentionBackendRegistry.register(member)(_dispatched)
    return names._value2member_map_[BACKEND_NAME]


def _dispatched(
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
    """What diffusers calls for a patched attention module.

    The tag comes as the mask, or as the ``_parallel_config`` of processors that take no mask.
    """
    tag = attn_mask
    if isinstance(_parallel_config, torch.Tensor):
        tag = _parallel_config if attn_mask is None and not torch.is_grad_enabled() else None
    elif _parallel_config is not None:
        raise ValueError("chipsparse does not run under context parallelism; call disable() first")
    is_tag = tag is not None and tag.dtype == torch.int64 and tag.ndim == 1
    if is_tag and (is_causal or enable_gqa or dropout_p > 0):  # what our op does not compute
        attn_mask = None if tag is attn_mask else attn_mask
        is_tag = False
    if not is_tag:
        return attention_dispatch.dispatch_attention_fn(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
        )
    return torch.ops.chipsparse.self_attention(query, key, value, tag, scale)
