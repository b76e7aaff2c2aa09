"""Independent float64 formulas, inputs and tolerances for the tests of the operations.

Nothing here uses the code under test: attention has the full score matrix and a full boolean mask,
the MLP goes neuron by neuron.
"""

import math
import os

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

DTYPES = [torch.float32, torch.bfloat16, torch.float16]

# Largest |error| / (1 + |expected|) per dtype of the inputs.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
# A log-sum-exp is float32 for all of these; half precision inputs may be multiplied as such.
LSE_TOLERANCE = {**TOLERANCE, torch.float16: 1e-4, torch.bfloat16: 1e-4}
# Column sums come back in bf16 for half precision inputs.
SUMS_TOLERANCE = {**TOLERANCE, torch.float16: 8e-3, torch.bfloat16: 8e-3}


def assert_close(actual, expected, tolerance):
    """Equal within a tolerance: a number, or that of a dtype."""
    most = TOLERANCE.get(tolerance, tolerance)
    torch.testing.assert_close(actual.double().cpu(), expected.double().cpu(), rtol=most, atol=most)


def assert_attention(found, expected, dtype):
    """Outputs and their log-sum-exps, of tensors of a dtype."""
    for tensor, other, tolerance in zip(found, expected, (TOLERANCE, LSE_TOLERANCE), strict=True):
        assert_close(tensor, other, tolerance[dtype])


def assert_rounded(actual, exact):
    """Equal to ``exact`` but for one rounding; Triton's interpreter truncates to bf16."""
    exact = exact.to(actual.device, torch.float64)
    facts = torch.finfo(actual.dtype)
    least = facts.smallest_normal * facts.eps
    torch.testing.assert_close(actual.double(), exact, rtol=facts.eps, atol=least, equal_nan=True)


INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") != "0"
# Kernels that nothing here runs.
NOT_HERE = set() if torch.cuda.is_available() else {"gluon", "triton"}
if INTERPRETED:
    NOT_HERE -= {"triton"}


def backend_names(operation, left_out=()):
    """Parameters for a test over the backends of an operation."""
    names = [backend.name for backend in operation.backends]
    here = [name for name in names if name not in {*left_out, *NOT_HERE}]
    return pytest.mark.parametrize("backend", here)


def kernel_names(operation):
    """As `backend_names`, of the kernels alone: for what references do not promise."""
    return backend_names(operation, left_out=("reference",))


def backend_of(operation, name):
    return next(backend for backend in operation.backends if backend.name == name)


def attention_inputs(batch, heads, rows, columns, width, *, dtype, device, strided=False, seed=0):
    """Random query, key and value; strided ones are views of ``[B, N, H, D]``."""
    generator = torch.Generator().manual_seed(seed)

    def tensor(length):
        data = torch.randn(batch, length, heads, width, generator=generator)
        data = data.to(device, dtype).transpose(1, 2)
        return data if strided else data.contiguous()

    return tensor(rows), tensor(columns), tensor(columns)


def blocks_of(rows, block_size):
    return (rows + block_size - 1) // block_size


def random_mask(batch, heads, rows, columns, block_size, *, device, seed=0):
    """bool ``[B, H, G, M]`` of any counts; the first block keeps nothing, the last one all."""
    generator = torch.Generator().manual_seed(seed)
    blocks = blocks_of(rows, block_size)
    share = torch.rand(batch, heads, blocks, 1, generator=generator)
    mask = torch.rand(batch, heads, blocks, columns, generator=generator) < share
    mask[:, :, 0] = False
    mask[:, :, -1] = True
    return mask.to(device)


def index_lists(mask):
    """int32 indices ``[..., K]`` and counts ``[...]`` of a mask, row by row."""
    rows = [row.nonzero().flatten().tolist() for row in mask.flatten(0, -2)]
    longest = max(map(len, rows))
    indices = torch.tensor([row + [0] * (longest - len(row)) for row in rows], dtype=torch.int32)
    counts = torch.tensor([len(row) for row in rows], dtype=torch.int32)
    shape = mask.shape[:-1]
    return indices.view(*shape, longest).to(mask.device), counts.view(shape).to(mask.device)


def scores_of(query, key, scale=None):
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return torch.einsum("bhnd,bhmd->bhnm", query.double(), key.double()) * scale


def full_attention(query, key, value, scale=None):
    scores = scores_of(query, key, scale)
    lse = torch.logsumexp(scores, dim=-1)
    return torch.exp(scores - lse[..., None]) @ value.double(), lse


def masked_attention(query, key, value, mask, block_size, scale=None):
    """Attention of each row over the columns its block keeps; 0 where there are none."""
    scores = scores_of(query, key, scale)
    keep = mask.repeat_interleave(block_size, dim=2)[:, :, : query.shape[2]]
    scores = scores.masked_fill(~keep, -torch.inf)
    return torch.where(keep, scores.softmax(-1), 0.0) @ value.double()


def attention_with_means(inputs, mask, block_size_q, means, weight, scale=None):
    """One softmax over the kept columns and the means, in float64."""
    query, key, value = inputs
    scores = scores_of(query, key, scale)
    kept = mask.repeat_interleave(block_size_q, dim=2)[:, :, : query.shape[2]]
    of_means = scores_of(query, means[0], scale) + math.log(weight)
    scores = torch.cat([scores.masked_fill(~kept, -torch.inf), of_means], -1)
    return scores.softmax(-1) @ torch.cat([value, means[1]], 2).double()


def column_sums_of(query, key, lse_previous, block_size):
    weights = torch.exp(scores_of(query, key) - lse_previous.double()[..., None])
    return torch.stack([part.sum(2) for part in weights.split(block_size, dim=2)], dim=2)


def activation_of(x, name):
    if name == "silu":
        return x / (1 + torch.exp(-x))
    if name == "gelu":
        return x * 0.5 * (1 + torch.erf(x / 2**0.5))
    return 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))


def neuron_activation(hidden, weight, bias, neuron, activation, gate=None):
    """One neuron on tokens ``[n, C]``: ``[n]``; gate is the weight and bias of a gated MLP."""

    def linear(weight, bias):
        result = hidden.double() @ weight[neuron].double()
        return result if bias is None else result + bias[neuron].double()

    if gate is not None:
        return activation_of(linear(*gate), activation) * linear(weight, bias)
    return activation_of(linear(weight, bias), activation)


def mlp_inputs(batch, rows, channels, neurons, *, dtype, device, seed=0):
    """Hidden ``[B, N, C]``, up weight ``[F, C]``, up bias ``[F]`` and down weight ``[C, F]``."""
    generator = torch.Generator().manual_seed(seed)

    def tensor(*shape, scale=1.0):
        return (torch.randn(shape, generator=generator) * scale).to(device, dtype)

    hidden = tensor(batch, rows, channels)
    up = tensor(neurons, channels, scale=channels**-0.5)
    return hidden, up, tensor(neurons, scale=0.5), tensor(channels, neurons, scale=neurons**-0.5)


def gate_inputs(channels, neurons, *, dtype, device, seed=1):
    """Weight ``[F, C]`` and bias ``[F]`` of a gate."""
    _, weight, bias, _ = mlp_inputs(1, 1, channels, neurons, dtype=dtype, device=device, seed=seed)
    return weight, bias


def token_contiguous(tensor):
    """A copy of ``[B, N, F]`` in the layout that kernels want, the padding of its storage NaN."""
    batch, rows, neurons = tensor.shape
    storage = tensor.new_full((batch, neurons, (rows + 7) // 8 * 8), torch.nan)
    copy = storage[:, :, :rows].mT
    copy.copy_(tensor)
    return copy


def padding_of(tensor):
    """What pads the tokens of each neuron in a tensor of `token_contiguous`: ``[B, F, n]``."""
    batch, rows, neurons = tensor.shape
    strides = (tensor.stride(0), tensor.stride(2), 1)
    return tensor.as_strided((batch, neurons, -rows % 8), strides, rows)


def without_padding(tensor):
    """Copies of ``[B, N, F]`` with contiguous tokens, none of them padded, and all around each.

    Other tokens on both sides of its own, or before them alone, or nothing behind its last neuron.
    """
    batch, rows, neurons = tensor.shape
    padded = (rows + 7) // 8 * 8
    for first, tokens in ((8, padded + 16), (padded - rows, padded), (0, padded)):
        count = batch * neurons * tokens - (padded - rows if first == 0 else 0)
        whole = tensor.new_full((count,), 7.0)
        strides = (neurons * tokens, 1, tokens)
        part = whole.as_strided((batch, rows, neurons), strides, first)
        part.copy_(tensor)
        yield part, whole


def random_neurons(batch, blocks, capacity, neurons, *, device, seed=0):
    """int32 ``[B, G, K]``, each list ascending and without repeats."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(batch, blocks, neurons, generator=generator)
    return scores.argsort(-1)[..., :capacity].sort(-1).values.int().to(device)


class LargestResult(TorchDispatchMode):
    """Notes the bytes of the largest tensor that is made."""

    nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result._base is None:
            self.nbytes = max(self.nbytes, result.nbytes)
        return result
