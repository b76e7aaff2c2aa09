"""What operations refuse, and what their Triton kernels leave to the reference."""

import pytest
import torch

from chipsparse.kernels.column_selection import column_selection
from chipsparse.kernels.column_sparse_attention import column_sparse_attention
from chipsparse.kernels.dense_attention import dense_attention
from chipsparse.kernels.dense_attention_column_sums import dense_attention_column_sums
from chipsparse.kernels.fp8_dense_attention import fp8_dense_attention
from chipsparse.kernels.fp8_dequantization import fp8_dequantization
from chipsparse.kernels.fp8_quantization import FP8, fp8_quantization
from chipsparse.kernels.fp8_rows import fp8_rows
from chipsparse.kernels.mask_packing import pack_mask, packed_to_indices, unpack_mask
from chipsparse.kernels.neuron_selection import neuron_selection
from chipsparse.kernels.piece_copies import copy_pieces
from chipsparse.kernels.sparse_mlp_down import sparse_mlp_down
from chipsparse.kernels.sparse_mlp_up import sparse_mlp_up

F32 = torch.float32
F16 = torch.float16


def zeros(*shape, dtype=F32):
    return torch.zeros(shape, dtype=dtype)


def ints(*shape):
    return zeros(*shape, dtype=torch.int32)


def octets(*shape):
    return zeros(*shape, dtype=torch.uint8)


ROWS = zeros(1, 2, 7, 64)
COLUMNS = zeros(1, 2, 9, 64)
LSE = zeros(1, 2, 7)
QKV = {"query": ROWS, "key": COLUMNS, "value": COLUMNS}
LISTED = {name: zeros(1, 2, 200, 64) for name in ("query", "key", "value")}
LAYER = {"hidden": zeros(1, 200, 24), "weight": zeros(50, 24), "bias": zeros(50)}
CACHE = zeros(1, 200, 50)
IN_FP8 = {"activation_cache": CACHE.to(FP8)}
RESIDUAL = {"residual": LISTED["key"].to(FP8)}
MEANS = {"mean_key": COLUMNS, "mean_value": COLUMNS}
GATE = {"gate_weight": zeros(50, 24)}
PIECE = zeros(1, 4, 2, 8)
APART = zeros(1, 4, 4, 8)[:, :, ::2]
CUT = {"tensors": (PIECE,), "pieces": (range(4),), "places": ((PIECE,),), "dim": 1}
EIGHT_BITS = fp8_quantization(**QKV, backend="reference")

# Arguments that fit.
GOOD = {
    column_selection: {"column_sums": zeros(1, 2, 3, 9), "keep_count": 3},
    column_sparse_attention: {**LISTED, "indices": ints(1, 2, 2, 5), "counts": ints(1, 2, 2)},
    dense_attention: QKV,
    dense_attention_column_sums: {**QKV, "lse_previous": LSE},
    fp8_dense_attention: {"tensors": EIGHT_BITS},
    fp8_dequantization: {"data": zeros(4, 8).to(FP8), "scale": zeros(4, 1), "dtype": F16},
    fp8_quantization: QKV,
    fp8_rows: {"rows": zeros(4, 8)},
    pack_mask: {"mask": zeros(4, 24, dtype=torch.bool)},
    unpack_mask: {"packed": octets(4, 3), "columns": 24},
    packed_to_indices: {"packed": octets(4, 3), "columns": 24},
    neuron_selection: {**LAYER, "mean_cache": zeros(1, 2, 50), "keep_count": 5},
    copy_pieces: CUT,
    sparse_mlp_down: {
        "delta": zeros(1, 200, 20),
        "weight": zeros(24, 50),
        "neuron_indices": ints(1, 2, 20),
        "output_cache": zeros(1, 200, 24),
    },
    sparse_mlp_up: {
        **LAYER,
        "neuron_indices": ints(1, 2, 20),
        "activation_cache": CACHE,
        "activation": "gelu",
    },
}
OUTSIDE = r"is not within dimension 1 of \[1, 4, 2, 8\]"
NEEDS_BOTH = "belongs to a residual in torch.float8_e4m3fn; .*"
# Of both operations that sum columns, and of both that have the first layer of an MLP.
OF_SUMS = [
    ({"lse_previous": zeros(1, 2, 9)}, r"lse_previous must be \[1, 2, 7\], got \[1, 2, 9\]"),
    ({"block_size_q": 0}, "block_size_q must be at least 1, got 0"),
]
OF_LAYERS = [
    ({"weight": zeros(24, 50)}, r"weight must be \[24, 24\], got \[24, 50\]"),
    ({"bias": zeros(3)}, r"bias must be \[50\], got \[3\]"),
    ({"gate_weight": zeros(3, 24)}, r"gate_weight must be \[50, 24\], got \[3, 24\]"),
    ({"gate_bias": zeros(50)}, "gate_bias needs gate_weight, which is None"),
]
# Other arguments, and what is said of them.
REFUSED = {
    column_selection: [
        ({"keep_count": -1}, "keep_count must not be negative, got -1"),
        ({"static_columns": zeros(5)}, "static_columns must be torch.bool, got torch.float32"),
        ({"static_columns": zeros(5).bool()}, r"static_columns must be \[9\], got \[5\]"),
        ({"column_sums": zeros(3, 9)}, r"must be \[B, H, G, M\], got \[3, 9\]"),
        ({"column_sums": ints(1, 2, 3, 9)}, "got torch.int32"),
    ],
    column_sparse_attention: [
        ({"indices": zeros(1, 2, 2, 5)}, "indices must be torch.int32, got torch.float32"),
        ({"indices": ints(1, 2, 3, 5)}, r"indices must be \[1, 2, 2, 5\], got \[1, 2, 3, 5\]"),
        ({"indices": ints(2, 5)}, r"\[B, H, G, K\], got \[2, 5\]"),
        ({"counts": zeros(1, 2, 2)}, "counts must be torch.int32"),
        ({"counts": ints(1, 2)}, r"counts must be \[1, 2, 2\]"),
        ({"residual": zeros(1, 2, 200)}, r"residual must be \[1, 2, 200, 64\], got \[1, 2, 200\]"),
        ({"residual": ints(1, 2, 200, 64)}, "residual must be a floating point tensor"),
        (RESIDUAL, f"{NEEDS_BOTH}float8_e4m3fn without it"),
        ({"residual_scale": LSE}, f"{NEEDS_BOTH}None with it"),
        ({"residual": LISTED["key"], "residual_scale": LSE}, f"{NEEDS_BOTH}float32 with it"),
        ({"mean_key": COLUMNS}, "mean_key and mean_value belong together; mean_value is None"),
        ({"mean_value": COLUMNS}, "mean_key is None"),
        ({**MEANS, "mean_value": ROWS}, r"mean_value must be \[1, 2, 9, 64\], got \[1, 2, 7, 64\]"),
        ({**MEANS, "mean_key": COLUMNS.half()}, "mean_key must be torch.float32"),
        ({**MEANS, "mean_key": COLUMNS[:, :, :0]}, r"mean_key must be a non-empty \[B, H, M, D\]"),
        ({**MEANS, "mean_weight": 0.0}, "mean_weight must be above 0 and finite, got 0.0"),
        ({**RESIDUAL, "residual_scale": zeros(1, 200)}, r"scale must be \[1, 2, 200\], got \[1,"),
        ({"block_size_q": 0}, "block_size_q must be at least 1, got 0"),
    ],
    dense_attention: [
        ({"key": COLUMNS[..., :32]}, r"key must be \[1, 2, 9, 64\], got \[1, 2, 9, 32\]"),
        ({"value": COLUMNS[:, :, :8]}, r"value must be \[1, 2, 9, 64\]"),
        ({"key": COLUMNS.half()}, "key must be torch.float32, got torch.float16"),
        ({"query": ROWS[0]}, r"query must be a non-empty .* got \[2, 7, 64\]"),
        ({"query": ROWS[:, :, :0]}, r"got \[1, 2, 0, 64\]"),
        ({"query": ROWS.int()}, "got torch.int32"),
        ({"key": COLUMNS[:, :, :0]}, r"key must be a non-empty .* got \[1, 2, 0, 64\]"),
        ({"key": COLUMNS.to("meta")}, "key is on meta, query on cpu"),
        ({"backend": "triton"}, "unknown backend 'triton'; it has gluon, library, reference"),
    ],
    dense_attention_column_sums: OF_SUMS,
    fp8_dense_attention: OF_SUMS,
    fp8_dequantization: [
        ({"data": zeros(4, 8)}, "data must be torch.float8_e4m3fn"),
        ({"data": zeros(8, 4).to(FP8).t()}, r"with strides \[1, 4\]"),
        ({"scale": zeros(4)}, r"scale must be float32 \[4, 1\] or \[1, 1\], got .* \[4\]"),
        ({"scale": zeros(2, 1)}, r"got torch.float32 \[2, 1\]"),
        ({"scale": zeros(4, 1).half()}, "got torch.float16"),
        ({"dtype": torch.int8}, "dtype must be a floating point type, got torch.int8"),
    ],
    fp8_quantization: [
        (dict.fromkeys(QKV, zeros(1, 2, 7, 96)) | {"rotate": True}, "a power of two, got 96"),
    ],
    fp8_rows: [
        ({"rows": zeros(2, 3, 4)}, r"\[M, K\], K of 1 or more, got \[2, 3, 4\]"),
        ({"rows": zeros(4, 0)}, r"got \[4, 0\]"),
        ({"rows": ints(4, 4)}, "got torch.int32"),
        ({"rows": zeros(4, 8).t()}, r"must be contiguous, got \[M, K\] with strides \[1, 8\]"),
        ({"turned": True}, r"rows must be \[B, M, K\], K of 1 or more, got \[4, 8\]"),
        ({"headroom": 0.5}, r"headroom must be within \[1, 448\], got 0.5"),
    ],
    pack_mask: [
        ({"mask": octets(4, 3)}, r"mask must be torch\.bool, got torch.uint8"),
        ({"mask": torch.tensor(True)}, "mask must have at least one dimension"),
    ],
    unpack_mask: [
        ({"columns": 16}, "16 columns take 2 bytes a row"),
        ({"packed": ints(4, 3)}, r"packed must be torch\.uint8, got torch.int32"),
    ],
    packed_to_indices: [
        ({"columns": 25}, r"25 columns take 4 bytes a row, packed is \[4, 3\]"),
        ({"capacity": -1}, "capacity must not be negative, got -1"),
        (
            {"packed": octets(1, 1) + 6, "columns": 3, "capacity": 1, "backend": "reference"},
            "a row keeps 2 columns, the capacity is 1",
        ),
    ],
    neuron_selection: [
        ({"keep_count": -1}, "keep_count must not be negative, got -1"),
        ({"hidden": zeros(1, 0, 24)}, r"hidden must be \[B, N, C\], got \[1, 0, 24\]"),
        *OF_LAYERS,
        ({"mean_cache": zeros(1, 3, 50)}, r"mean_cache must be \[1, 2, 50\]"),
        ({"mean_cache": zeros(1, 2, 50).half()}, "got torch.float16"),
        ({"block_size": 0}, "block_size must be at least 1, got 0"),
        (GATE, "activation must be gelu-tanh, gelu or silu, got None"),
    ],
    copy_pieces: [
        *(
            ({"pieces": (piece,)}, OUTSIDE)
            for piece in (range(3, 5), range(-1, 2), range(3, 2), range(0, 4, 2))
        ),
        ({"dim": 3}, "dim must be 1"),
        ({"tensors": (PIECE,) * 4}, "one to three tensors, got 4"),
        ({"tensors": (PIECE, PIECE[:, :3])}, r"tensors must be \[1, 4, 2, 8\]"),
        ({"tensors": (PIECE[0],)}, r"tensors must be \[B, N, H, D\]"),
        ({"pieces": (range(3),)}, r"places must be \[1, 3, 2, 8\], got \[1, 4, 2, 8\]"),
        ({"places": ((PIECE.half(),),)}, "places must be torch.float32"),
        ({"places": ((),)}, "places must be 1 of a piece: 0"),
        ({"tensors": (PIECE,) * 2, "places": ((PIECE, APART),)}, "the same strides"),
    ],
    sparse_mlp_down: [
        ({"delta": zeros(200, 20)}, r"delta must be \[B, N, K\], got \[200, 20\]"),
        ({"weight": zeros(24)}, r"weight must be \[C, F\], got \[24\]"),
        ({"weight": zeros(24, 50).half()}, "weight must be torch.float32"),
        ({"delta": zeros(1, 200, 21)}, r"neuron_indices must be \[1, 2, 21\]"),
        ({"output_cache": zeros(1, 200, 25)}, r"output_cache must be \[1, 200, 24\]"),
        ({"output_cache": ints(1, 200, 24)}, "got torch.int32"),
        ({"addend": zeros(200, 24)}, r"addend must be \[1, 200, 24\], got \[200, 24\]"),
        ({"addend": ints(1, 200, 24)}, "addend must be a floating point tensor"),
        ({"block_size": -1}, "block_size must be at least 1, got -1"),
    ],
    sparse_mlp_up: [
        ({"activation": "relu"}, "got 'relu'"),
        ({"hidden": zeros(200, 24)}, r"hidden must be \[B, N, C\], got \[200, 24\]"),
        *OF_LAYERS,
        ({"weight": zeros(50, 24).half()}, "weight must be torch.float32, got torch.float16"),
        ({"neuron_indices": ints(1, 2, 20).long()}, "must be torch.int32, got torch.int64"),
        ({"block_size": 64}, r"neuron_indices must be \[1, 4, 20\], got \[1, 2, 20\]"),
        ({"activation_cache": zeros(1, 200, 51)}, r"activation_cache must be \[1, 200, 50\]"),
        ({"gate_weight": zeros(50, 24).half()}, "gate_weight must be torch.float32"),
        ({**GATE, "gate_bias": zeros(3)}, r"gate_bias must be \[50\], got \[3\]"),
        (IN_FP8, "must be a floating point tensor, got torch.float8_e4m3fn"),
        ({"cache_scale": zeros(1, 200, 1)}, "cache must be torch.float8_e4m3fn, got torch.float32"),
        ({**IN_FP8, "cache_scale": zeros(1, 200, 1).double()}, "cache_scale must be torch.float32"),
        ({**IN_FP8, "cache_scale": zeros(1, 200)}, r"scale must be \[1, 200, 1\], got \[1, 200\]"),
    ],
}


@pytest.mark.parametrize("operation", GOOD, ids=lambda operation: operation.__name__)
def test_mistakes_are_named_with_their_values(operation):
    operation(**GOOD[operation], backend="reference")
    unknown = {"backend": "fast"}, "unknown backend 'fast'; it has .*reference"
    for change, message in [*REFUSED[operation], unknown]:
        with pytest.raises(ValueError, match=f"^{operation.__name__}: .*{message}"):
            operation(**{**GOOD[operation], **change})


HALF_QKV = [zeros(1, 2, 8, 64, dtype=F16)] * 3
HALF_LAYER = [zeros(1, 20, 24, dtype=F16), zeros(50, 24, dtype=F16), None]
SHIFTED = zeros(2 * 8 * 64 + 1, dtype=F16)[1:].view(1, 2, 8, 64)
TURNED = zeros(1, 50, 24, dtype=F16).mT
DOWN = [zeros(1, 20, 9, dtype=F16), zeros(50, 24, dtype=F16).T, 128]
NOT_HALF = "needs fp16 or bf16, got torch.float32"
ROWS_OF = "rows of {} are not contiguous"
# Facts that the Triton kernel of an operation takes; then the place and value of another, and why
# it cannot run with that.
TAKEN = {
    column_selection: [zeros(1, 2, 3, 9)],
    column_sparse_attention: [*HALF_QKV, 128],
    dense_attention_column_sums: [*HALF_QKV, 128],
    fp8_dense_attention: [HALF_QKV[0], F16, 128],
    fp8_dequantization: [zeros(4, 8).to(FP8), F16],
    fp8_quantization: HALF_QKV,
    fp8_rows: [zeros(4, 8)],
    neuron_selection: [*HALF_LAYER, zeros(1, 1, 50)],
    copy_pieces: [PIECE],
    sparse_mlp_down: DOWN,
    sparse_mlp_up: [*HALF_LAYER, 128, TURNED[:, :20]],
}
NOT_TAKEN = [
    (column_selection, 0, zeros(1, 2, 3, 9).double(), "computes in float32, got torch.float64"),
    (column_sparse_attention, 0, zeros(1, 2, 8, 64), NOT_HALF),
    (column_sparse_attention, 0, zeros(1, 2, 8, 96, dtype=F16), "head size 64 or 128, got 96"),
    (column_sparse_attention, 1, zeros(1, 2, 64, 8, dtype=F16).mT, ROWS_OF.format("key")),
    (dense_attention_column_sums, 2, SHIFTED, "value does not start at a multiple of 16 bytes"),
    (fp8_dense_attention, 1, F32, NOT_HALF),
    (fp8_dequantization, 1, F32, NOT_HALF),
    (fp8_quantization, 0, zeros(1, 2, 8, 64), NOT_HALF),
    (fp8_rows, 0, zeros(4, 8).double(), "computes in float32, got torch.float64"),
    (neuron_selection, 0, zeros(1, 20, 24), NOT_HALF),
    (neuron_selection, 1, zeros(24, 50, dtype=F16).T, ROWS_OF.format("weight")),
    (neuron_selection, 1, zeros(1, 24, dtype=F16).expand(65537, 24), "at most 65536 neurons"),
    (neuron_selection, 3, zeros(1, 1, 50).double(), "mean_cache of torch.float32"),
    (copy_pieces, 0, zeros(1, 4, 2, 16)[..., ::2], "the head dimension is not contiguous"),
    (sparse_mlp_down, 0, zeros(1, 20, 9), NOT_HALF),
    (sparse_mlp_down, 1, zeros(50, 20, dtype=F16).T, "needs a multiple of 8 channels, got 20"),
    (sparse_mlp_down, 1, zeros(24, 50, dtype=F16), r"the transpose of .*strides \(50, 1\)"),
    (sparse_mlp_up, 0, zeros(1, 20, 24), NOT_HALF),
    (sparse_mlp_up, 0, zeros(1, 20, 20, dtype=F16), "needs a multiple of 8 channels, got 20"),
    (sparse_mlp_up, 0, zeros(1, 20, 25, dtype=F16)[..., 1:], ROWS_OF.format("hidden")),
    (sparse_mlp_up, 1, zeros(24, 50, dtype=F16).T, ROWS_OF.format("weight")),
    (sparse_mlp_up, 2, zeros(24, 50, dtype=F16).T, ROWS_OF.format("gate_weight")),
    (sparse_mlp_up, 4, zeros(1, 20, 50), r"tokens are contiguous.*strides \(1000, 50, 1\)"),
    (sparse_mlp_up, 4, zeros(1, 50, 20).mT, r"strides \(1000, 1, 20\)"),
    (sparse_mlp_up, 4, zeros(1, 20, 50).double(), "fp16, bf16, fp32 or e4m3"),
]


@pytest.mark.parametrize("operation", TAKEN, ids=lambda operation: operation.__name__)
def test_kernels_say_what_they_do_not_support(operation, monkeypatch):
    facts = TAKEN[operation]
    monkeypatch.setattr("chipsparse.kernels.triton_support.interpreting", lambda: False)
    with pytest.raises(ValueError, match="cannot run here: CPU tensors need Triton's interpreter"):
        operation.choose(*facts, backend="triton")
    monkeypatch.setattr("chipsparse.kernels.triton_support.interpreting", lambda: True)
    assert operation.choose(*facts, backend="triton").backend.name == "triton"
    changes = [change for name, *change in NOT_TAKEN if name is operation]
    assert changes
    for place, other, reason in changes:
        with pytest.raises(ValueError, match=f"backend 'triton' cannot run here: .*{reason}"):
            operation.choose(*facts[:place], other, *facts[place + 1 :], backend="triton")
