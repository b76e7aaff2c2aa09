"""A transformer whose tokens several processes share: what is cut where, and attention between.

The adapter's hooks that put tokens in order cut them as well, and the one that restores their order
gathers them before, so each process runs the blocks on its own tokens. The exchange of tokens for
heads is around the attention of a layer, whatever that does: all processes make the same exchanges,
and what a layer decides cannot let one wait for another.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from chipsparse.layout import ModelLayout
from chipsparse.parallel.head_chunks import HeadChunks
from chipsparse.parallel.head_exchange import HeadExchange
from chipsparse.parallel.sequence_cut import check_heads, cut_sequence, with_largest_share
from chipsparse.pipelines.ops import LayerCall
from chipsparse.sparse.layers.state import OpenCall

CUT = "chipsparse_cut"
# What a process without text passes through blocks that need some. A multiple of 16, as its video
# or image tokens are, since products of other counts are slower. And not a single token: where one
# is joined to others, torch.compile lays out the result with tokens innermost (it takes that part
# for channels last), and each layer of HunyuanVideo took 5 to 8 ms longer on an H100.
SOME_TEXT = 16


class SplitSequence:
    """The shard of one process in the calls of one transformer.

    Each `rows` tokens stay together, because they share a list of neurons. If the blocks need text
    tokens, a process without text passes `SOME_TEXT` of them through, or all if there are fewer;
    attention leaves them out.
    """

    def __init__(self, exchange: HeadExchange, *, rows: int, needs_text: bool = False) -> None:
        self.exchange = exchange
        self._rows = rows
        self._spare_text = SOME_TEXT if needs_text else 0
        self._layout: ModelLayout

    def open(self, layout: ModelLayout) -> ModelLayout:
        """Cut the tokens of a call, and return its layout with this process's shard."""
        ranks = self.exchange.ranks
        check_heads(layout, ranks)
        self._layout = layout
        self._cut = cut_sequence(layout, ranks, self._rows)
        return with_largest_share(layout, self._cut)

    @property
    def has_text(self) -> bool:
        """True where this process's shard includes text tokens."""
        return self._cut.text[self.exchange.rank] > 0

    def own_grid(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """This process's part of a tensor with all video or image tokens along a dimension."""
        rank = self.exchange.rank
        return tensor.narrow(dim, self._cut.first(rank), self._cut.grid[rank])

    def own_text(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """The same of a tensor with the text tokens: all of them, or hardly any."""
        if self.has_text:
            return tensor
        return tensor.narrow(dim, 0, min(self._spare_text, tensor.shape[dim]))

    def whole_grid(self, tokens: torch.Tensor) -> torch.Tensor:
        """All video or image tokens ``[B, N, C]``, from those of each process."""
        return self.exchange.gather(tokens, self._cut.grid)

    def attend(
        self,
        attend: LayerCall,
        state: OpenCall | None,
        *states: torch.Tensor,
        **options: Any,
    ) -> torch.Tensor:
        """The layer's attention of this process's tokens, of q, k and v ``[B, H, n, D]``."""
        own = self._cut.tokens[self.exchange.rank]
        spare = states[0].shape[2] - own  # of `SOME_TEXT`, where the text would stand
        front, back = (spare, 0) if self._layout.text_first else (0, spare)
        # In the model's order [B, N, H, D], in which q, k and v come.
        states = tuple(part.transpose(1, 2)[:, front : front + own] for part in states)
        chunks = HeadChunks(self.exchange, states, self._cut)
        output = chunks.finish(
            attend(state, chunks.query, chunks.key, chunks.value, **options, chunks=chunks),
        )
        if not spare:
            return output
        return F.pad(output.transpose(1, 2), (0, 0, 0, 0, front, back)).transpose(1, 2)

    def check_same_calls(self, state: OpenCall, arguments: dict[str, Any], *, first: bool) -> None:
        """Raises `PeerError` where others make another call, or a first one with other inputs."""
        context = state.place
        facts: dict[str, object] = {
            "what they compute": f"step {context.step} of {context.branch!r}, {state.action.value}",
        }
        if first:
            plan = state.plan
            facts |= {
                "steps": plan.steps,
                "config": str(plan.config),
                "size": str([plan.layout.grids, plan.layout.batch, plan.layout.text_tokens]),
                "latents": checksum(arguments["hidden_states"]),
                "prompt": checksum(arguments.get("encoder_hidden_states")),
            }
        self.exchange.peers.check_same(facts)


class CutAtEntry:
    """Mixin of transformer blocks: the first one cuts the tokens that it is called with.

    Outside of ``forward`` and of hooks, so that compiled blocks do not see it.
    """

    def __call__(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Run the block on this process's shard, if the adapter cuts at this block."""
        cut = vars(self).get(CUT)
        if cut is not None:
            hidden_states, encoder_hidden_states = cut(hidden_states, encoder_hidden_states)
        return super().__call__(  # type: ignore[misc]
            hidden_states,
            encoder_hidden_states,
            *args,
            **kwargs,
        )


def checksum(tensor: torch.Tensor | None) -> str:
    """A number that differs wherever a tensor does, very probably. Waits for the device."""
    if tensor is None:
        return "none"
    wide = tensor.detach().double().flatten()
    weights = torch.linspace(1.0, 2.0, wide.numel(), dtype=wide.dtype, device=wide.device)
    return f"{list(tensor.shape)} {float(wide @ weights):.17g}"
