"""The stand-in for text in blocks that need some, on a process without."""

import ast
import re

import pytest
import torch
from diffusers.models.embeddings import apply_rotary_emb
from diffusers.models.normalization import RMSNorm
from torch._inductor.utils import run_and_get_code

from chipsparse.pipelines.parallel.split_sequence import SOME_TEXT

VIDEO, HEADS, WIDTH = 480, 4, 64
MODEL_ORDER = [HEADS * WIDTH, WIDTH, 1]


class Query(torch.nn.Module):
    """HunyuanVideo's single blocks: the last tokens are text, and not rotated."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(HEADS * WIDTH, HEADS * WIDTH)
        self.norm = RMSNorm(WIDTH, 1e-6)

    def forward(self, states, angles):
        query = self.norm(self.linear(states).unflatten(2, (HEADS, WIDTH)))
        video = apply_rotary_emb(query[:, :VIDEO], angles, sequence_dim=1)
        joined = torch.cat([video, query[:, VIDEO:]], dim=1).transpose(1, 2)
        return torch.nn.functional.scaled_dot_product_attention(joined, joined, joined)


@pytest.mark.slow
def test_compiled_blocks_join_it_with_the_tokens_in_the_model_order():
    states = torch.randn(1, VIDEO + SOME_TEXT, HEADS * WIDTH)
    angles = tuple(torch.randn(2, VIDEO, WIDTH))
    with torch.no_grad():
        _, (code,) = run_and_get_code(torch.compile(Query()), states, angles)
    found = re.findall(r"empty_strided_cpu\((\([^)]*\)), (\([^)]*\))", code)
    shapes = [(ast.literal_eval(size), ast.literal_eval(stride)) for size, stride in found]
    joined = [stride for size, stride in shapes if size == (1, VIDEO + SOME_TEXT, HEADS, WIDTH)]
    assert joined
    assert all(list(stride[1:]) == MODEL_ORDER for stride in joined), joined
