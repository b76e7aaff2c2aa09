"""Static window attention, the control of choosing columns: each group keeps what lies around it.

It runs through chipsparse's own sessions and operations. Every query group keeps as many columns as
the config would choose for it, but those of the tokens nearest to the group's centre in frames,
rows and columns of the token grid; text columns are kept as ever. With ``delta_rule: kept_only``
nothing else enters a sparse step, and with ``merge`` the window joins chipsparse's cache.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from chipsparse.attention import AttentionBudget
from chipsparse.layout import ModelLayout
from chipsparse.session import Session


class WindowSession(Session):
    """A session whose columns are a window and no choice."""

    def _attention_budget(self, layer: int, key: torch.Tensor) -> AttentionBudget:
        chosen = super()._attention_budget(layer, key)
        count = chosen.keep_count + chosen.random_count
        assert self.plan is not None
        order = None if self.token_order is None else self.token_order[0].cpu()
        columns = window_columns(
            self.plan.layout, order, count=count, group_rows=self.config.attention.group_rows
        )
        return replace(
            chosen,
            keep_count=0,
            random_count=0,
            static_columns=columns.to(key.device),
            static_count=int(columns.sum(-1).max()),
        )


def window_columns(
    layout: ModelLayout, order: torch.Tensor | None, *, count: int, group_rows: int
) -> torch.Tensor:
    """The columns of every query group's window, text included.

    Args:
        layout: sizes of the call.
        order: int64 ``[grid tokens]``, the raster token at each place; None for raster order.
        count: columns of a group; at least the text's are kept.
        group_rows: rows of a group. One of text rows alone keeps every column.

    Returns:
        bool ``[G, N]``.

    Raises:
        ValueError: if the sequence holds several pictures, between which there is no distance.
    """
    if len(layout.grids) != 1:
        raise ValueError(f"a window needs one token grid, got {len(layout.grids)}")
    places = torch.cartesian_prod(*(torch.arange(float(size)) for size in layout.grids[0]))
    if order is not None:
        places = places[order]
    first = layout.text_tokens if layout.text_first else 0
    nearest = min(max(0, count - layout.text_tokens), layout.grid_tokens)
    columns = torch.ones(-(-layout.tokens // group_rows), layout.tokens, dtype=torch.bool)
    for group, row in enumerate(columns):
        rows = slice(max(0, group * group_rows - first), max(0, (group + 1) * group_rows - first))
        own = places[rows]
        if len(own):
            distances = (places - own.mean(0)).square().sum(-1)
            window = row[first : first + layout.grid_tokens]
            window.fill_(False)
            window[distances.argsort(stable=True)[:nearest]] = True
    return columns
