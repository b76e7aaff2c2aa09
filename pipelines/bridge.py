"""The bridge between a model's layers and its adapter: one attention backend, five custom ops.

diffusers hands q, k and v to an attention backend but tells it neither layer nor step. So every
patched module carries a *tag*, a small integer tensor with the numbers of its adapter and layer,
which travels as the (otherwise unused) attention mask, or on a processor that takes no mask. A
tensor rather than a Python number: under ``torch.compile`` it is an input and not a guard, and one
graph serves all blocks. The state sits behind the custom ops, outside the graph.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from diffusers.models import attention_dispatch

from chipsparse.layers.mlp_weights import Fp8MLPWeights, MLPWeights, part_of
from chipsparse.pipelines.patches import TAG

if TYPE_CHECKING:
    from chipsparse.pipelines.adapter import ModelAdapter

T = TypeVar("T", bound=Callable[..., torch.Tensor])

BACKEND_NAME = "chipsparse"
ANY = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
KEYWORD_ONLY = inspect.Parameter.KEYWORD_ONLY

# What the ops do differs from step to step, so a CUDA graph must not record them.
STATEFUL = (torch.Tag.cudagraph_unsafe,)

# What PyTorch asks for first where ``torch.autocast`` is on for tensors of these devices.
AUTOCAST_KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}

_library = torch.library.Library("chipsparse", "FRAGMENT")


def _operation(fake: Callable[..., torch.Tensor]) -> Callable[[T], T]:
    """Makes a function an op.

    ``torch.library.custom_op`` does the same and looks after gradients and aliases besides, at
    twenty times the cost of a call. These ops run without gradients, and return new tensors.

    Args:
        fake: from the op's arguments an empty tensor of the shape and dtype of its result.
    """

    def register(function: T) -> T:
        name = function.__name__
        schema = torch.library.infer_schema(function, mutates_args=())
        _library.define(name + schema, tags=STATEFUL)
        _library.impl(name, function, "CompositeExplicitAutograd")
        for device_type, key in AUTOCAST_KEYS.items():
            _library.impl(name, _under_autocast(name, device_type), key)
        torch.library.register_fake(f"chipsparse::{name}", fake, lib=_library)
        return function

    return register


def _under_autocast(name: str, device_type: str) -> Callable[..., torch.Tensor]:
    """The arguments of an op under ``torch.autocast``: like a linear's, all get one dtype.

    Weights are cast for the call alone. Autocast keeps copies of those that linears use, but hands
    them to nobody.
    """

    def call(*args: Any) -> torch.Tensor:
        dtype = torch.get_autocast_dtype(device_type)
        cast = [_as_autocast(each, device_type, dtype) for each in args]
        with torch.autocast(device_type, enabled=False):
            result: torch.Tensor = getattr(torch.ops.chipsparse, name)(*cast)
        return result

    return call


def _as_autocast(argument: Any, device_type: str, dtype: torch.dtype) -> Any:
    """A tensor in autocast's dtype, with the strides that it had; others as they are."""
    if not isinstance(argument, torch.Tensor) or argument.device.type != device_type:
        return argument
    casts = argument.is_floating_point() and argument.dtype != torch.float64
    return argument.to(dtype) if casts else argument


# As `AttentionLayer` and `MLPLayer` are called.
LayerCall = Callable[..., torch.Tensor]


# Custom ops take tensors and numbers only, so an op finds its adapter by number. The map holds no
# adapter alive and is empty unless something is patched.
_runners: weakref.WeakValueDictionary[int, ModelAdapter] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


def register_runner(runner: ModelAdapter) -> int:
    """Gives an adapter the number under which the ops find it."""
    number = next(_numbers)
    _runners[number] = runner
    return number


def make_tag(runner_number: int, layer: int) -> torch.Tensor:
    """The tag of one layer: int64 ``[2]`` on the CPU."""
    return torch.tensor([runner_number, layer])


def _find(tag: torch.Tensor) -> tuple[ModelAdapter, int]:
    number, layer = tag.tolist()
    runner = _runners.get(number)
    if runner is None:
        raise RuntimeError(
            "a copy of a layer that chipsparse had patched is called after its model was restored; "
            "make the copy after chipsparse.disable(pipe)"
        )
    if runner.session.state is None and not runner.is_calling:
        runner.called_outside()
    return runner, layer


@_operation(lambda query, *_: query.new_empty(query.shape))
def self_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tag: torch.Tensor,
    scale: float | None,
) -> torch.Tensor:
    """Self-attention of the tagged layer; all tensors ``[B, N, H, D]``, the result contiguous."""
    runner, layer = _find(tag)
    attend = runner.attention(layer)
    output = attend(
        runner.session.state,
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        scale=scale,
        unpatched=functools.partial(runner.unpatched_attention, layer),
    )
    return output.transpose(1, 2).contiguous()


@_operation(
    lambda hidden, up, up_bias, down, *_: hidden.new_empty((*hidden.shape[:-1], down.shape[0]))
)
def feed_forward(
    hidden: torch.Tensor,
    up: torch.Tensor,
    up_bias: torch.Tensor | None,
    down: torch.Tensor,
    down_bias: torch.Tensor | None,
    tag: torch.Tensor,
    activation: str,
    gate: str,
    gate_weight: torch.Tensor | None,
    gate_bias: torch.Tensor | None,
) -> torch.Tensor:
    """Feed-forward layer of the tagged block; see `MLPWeights.from_linears` for the weights."""
    runner, layer = _find(tag)
    weights = MLPWeights.from_linears(
        up, up_bias, down, down_bias, activation, gate, gate_weight, gate_bias
    )
    return runner.session.mlp[layer](runner.session.state, hidden, weights).contiguous()


@_operation(lambda hidden, tag, channels: hidden.new_empty((*hidden.shape[:-1], channels)))
def fp8_feed_forward(hidden: torch.Tensor, tag: torch.Tensor, channels: int) -> torch.Tensor:
    """Feed-forward layer of the tagged block, ``[B, N, channels]``, whose weights are in FP8.

    They are torchao's tensors, which operations of ours cannot take: the layer is asked for them.
    """
    runner, layer = _find(tag)
    weights = runner.fp8_weights(layer)
    return runner.session.mlp[layer](runner.session.state, hidden, weights).contiguous()


@_operation(
    lambda joined, up, up_bias, out, *_: joined.new_empty((*joined.shape[:-1], out.shape[0]))
)
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
    make = MLPWeights.from_linears
    return _beside_attention(make, joined, up, up_bias, out, out_bias, tag, activation, gate)


@_operation(lambda joined, tag, channels: joined.new_empty((*joined.shape[:-1], channels)))
def fp8_parallel_feed_forward(
    joined: torch.Tensor, tag: torch.Tensor, channels: int
) -> torch.Tensor:
    """`parallel_feed_forward` ``[B, N, channels]`` of weights in FP8, as of `fp8_feed_forward`.

    The attention's part and the neurons are rounded apart where the model rounds them as one row.
    """
    runner, layer = _find(tag)
    whole = runner.fp8_weights(layer)
    linears = whole.up, whole.up_bias, whole.down, whole.down_bias
    return _beside_attention(Fp8MLPWeights, joined, *linears, tag, whole.activation, whole.gate)


def _beside_attention(
    make: Callable[..., MLPWeights | Fp8MLPWeights],
    joined: torch.Tensor,
    up: torch.Tensor,
    up_bias: torch.Tensor | None,
    out: torch.Tensor,
    out_bias: torch.Tensor | None,
    tag: torch.Tensor,
    activation: str,
    gate: str,
) -> torch.Tensor:
    """`parallel_feed_forward`, with what makes the layer's weights of its part of the linears."""
    runner, layer = _find(tag)
    session = runner.session
    width = joined.shape[-1] - up.shape[1]
    attention, hidden = joined[..., :width], joined[..., width:]
    own = slice(-(out.shape[1] - width) * (1 if gate == "none" else 2), None)
    up, up_bias = part_of(up, own), None if up_bias is None else up_bias[own]
    weights = make(up, up_bias, part_of(out, columns=slice(width, None)), None, activation, gate)

    def project() -> torch.Tensor:
        # As rows of one matrix: for others a linear adds its bias by another pass over the result.
        own_columns = part_of(out, columns=slice(width))
        projected = weights.linear(attention.flatten(0, -2), own_columns, out_bias)
        return projected.unflatten(0, joined.shape[:-1])

    return session.mlp[layer](session.state, hidden, weights, addend=project).contiguous()


def attention_backend(other: Any = None) -> Any:
    """The member of diffusers' ``AttentionBackendName`` that leads to `self_attention`.

    Added to the Enum on first use; diffusers looks backends up there and nowhere else.

    Args:
        other: the backend that it takes the place of, for what our op does not compute; None for
            the one that is active in diffusers at the time.
    """
    names = attention_dispatch.AttentionBackendName
    over = None if other is None else names(other)
    value = BACKEND_NAME if over is None else f"{BACKEND_NAME}_over_{over.value}"
    if value not in names._value2member_map_:
        member = str.__new__(names, value)
        member._name_, member._value_ = value.upper(), value
        member.is_chipsparse = True
        names._member_map_[member._name_] = member
        names._member_names_.append(member._name_)
        names._value2member_map_[value] = member
        attention_dispatch._AttentionBackendRegistry.register(member)(_dispatcher(over))
    return names._value2member_map_[value]


def is_claimed(module: Any) -> bool:
    """Return whether an attention module leads to our op now.

    It does not where gradients are recorded, nor after somebody replaced its processor.
    """
    backend = getattr(module.processor, "_attention_backend", None)
    ours: bool = getattr(backend, "is_chipsparse", False)  # what compiled code can ask
    return ours and not torch.is_grad_enabled()


def forward_arguments(module: torch.nn.Module) -> tuple[str, ...]:
    """The names of the arguments of the ``forward`` of a module's class, in order.

    Of one that takes any and hands them on, they are called as in the class below.
    """
    original: Any = getattr(module, "_orig_mod", module)  # of a compiled one
    names: dict[str, None] = {}
    for model_class in type(original).__mro__:
        forward = vars(model_class).get("forward")
        if forward is None:
            continue
        parameters = [*inspect.signature(forward).parameters.values()][1:]
        open_ended = {each.name for each in parameters if each.kind in (*ANY, KEYWORD_ONLY)}
        names |= {each.name: None for each in parameters if each.name not in open_ended}
        if not open_ended:
            break
    return tuple(names)


@functools.cache  # one hook for all blocks of a kind: compiled ones share one graph
def tagging_hook(names: tuple[str, ...], *, over_masks: bool) -> Callable[..., Any]:
    """A forward pre-hook of attention modules: passes their tag as the mask.

    Args:
        names: the `forward_arguments` of the modules; ``attention_mask`` is among them.
        over_masks: see ``tags_over_masks``.
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
            attn_mask, _parallel_config, other_kind=is_causal or dropout_p > 0
        )
        if tag is not None:
            if enable_gqa:  # our kernels want a key for each head of the queries
                shared = query.shape[2] // key.shape[2]
                key, value = (each.repeat_interleave(shared, dim=2) for each in (key, value))
            return torch.ops.chipsparse.self_attention(query, key, value, tag, scale)
        return attention_dispatch.dispatch_attention_fn(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, backend=over
        )

    return dispatched


def _read_tag(
    mask: torch.Tensor | None, parallel_config: Any, *, other_kind: bool
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The tag of a call and its mask; no tag where the call is not for our op.

    The tag comes as the mask, or as the ``_parallel_config`` of processors that take no mask.

    Args:
        mask: of the call, or the tag.
        parallel_config: of the call, or the tag.
        other_kind: whether the attention is of another kind than our op computes.
    """
    if isinstance(parallel_config, torch.Tensor):
        tag = parallel_config
        ours = mask is None and not torch.is_grad_enabled()
    elif parallel_config is not None:
        raise ValueError(
            "enable_parallelism() was called on a patched transformer; call it before "
            "chipsparse.enable()"
        )
    elif mask is not None and mask.dtype == torch.int64 and mask.ndim == 1:
        tag, mask, ours = mask, None, True
    else:
        return None, mask
    return (tag if ours and not other_kind else None), mask
