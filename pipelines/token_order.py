"""The order of a transformer's tokens: hooks where they enter and leave, and where they are cut.

Hooks are outside of the blocks. A family whose tokens enter or leave otherwise has a token order of
its own.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from chipsparse.pipelines.call_reader import Arguments, CallReader
from chipsparse.pipelines.ops import LayerCall
from chipsparse.pipelines.patches import Patches


class TokenOrder:
    """Puts the tokens of one transformer in order, and cuts them for several processes."""

    reader: CallReader

    def __init__(self, reader: CallReader, patches: Patches) -> None:
        self.reader = reader
        self.family = reader.family
        self.model = reader.model
        self.session = reader.session
        self.split = reader.split
        self.loop = reader.loop
        self.patches = patches

    # Hooks.

    def install(self) -> None:
        """Hook the modules where tokens enter, rotary embeddings are made, and tokens leave."""
        names = self.family.modules
        add = self.model.register_forward_pre_hook
        self.patches.add_hook(add(self._change_inputs, with_kwargs=True))
        if names.embedding:
            self.hook_output(names.embedding, self.order_embedded)
        if names.rotary:
            self.hook_output(names.rotary, self.ordered_rotary)
        if names.last:
            last = self.model.get_submodule(names.last)
            self.patches.add_hook(last.register_forward_pre_hook(self.restore_order))

    def hook_output(self, name: str, hook: Callable[..., Any], **options: Any) -> None:
        """Add a forward hook to one of the transformer's modules."""
        module = self.model.get_submodule(name)
        self.patches.add_hook(module.register_forward_hook(hook, **options))

    def replace_method(self, name: str, method: Callable[..., Any]) -> None:
        """Replace a method of the model, which the new one gets before the arguments."""
        stock = getattr(self.model, name)
        replaced = functools.wraps(stock)(functools.partial(method, stock))
        self.patches.set_attribute(self.model, name, replaced)

    def _change_inputs(self, _module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Forward pre-hook of the transformer: orders its inputs where its layers are ours."""
        if not self.reader.is_ours:
            return None
        arguments = self.reader.named(args, kwargs)
        self.order_inputs(arguments)
        return (), arguments

    def order_inputs(self, arguments: Arguments) -> None:
        """Put what the transformer is given for each token in order: `PerToken.arguments`."""
        for name, dim in self.family.per_token.arguments.items():
            given = arguments.get(name)
            if isinstance(given, torch.Tensor):
                arguments[name] = self.ordered(given, dim)
            elif given is not None:
                arguments[name] = [self.ordered(tensor, dim) for tensor in given]

    def order_embedded(self, _module: Any, _args: Any, output: torch.Tensor) -> torch.Tensor:
        """Forward hook of the module that makes tokens of latents."""
        return self.ordered(output, 1)

    def ordered_rotary(self, _module: Any, _args: Any, output: Any) -> Any:
        """Forward hook of a rotary embedding: what it made for the grid's tokens, `ordered`."""
        return tuple(self.ordered(part, self.family.per_token.rotary_dim) for part in output)

    def restore_order(self, _module: Any, args: tuple[torch.Tensor, ...]) -> Any:
        """Forward pre-hook of what takes the grid's tokens last, in raster order."""
        hidden, *rest = args
        return (self.restored(hidden), *rest)

    # Order and cuts of a tensor.

    @property
    def moves_tokens(self) -> bool:
        """True if the tokens of the open call are reordered, or cut for several processes."""
        return self.session.tile_order is not None or self.split is not None

    def ordered(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this process's share of the grid's tokens along a dimension, in their order."""
        if self.session.tile_order is not None:
            order, _ = self.session.tile_order
            tensor = tensor.index_select(dim, order.to(tensor.device))
        return tensor if self.split is None else self.split.own_grid(tensor, dim)

    def grid_order(self, grid: int) -> torch.Tensor | None:
        """Return the order of the tokens of one grid, int64 ``[N]``; None: unchanged."""
        if self.session.tile_order is None or self.session.plan is None:
            return None
        order, _ = self.session.tile_order
        sizes = [math.prod(sides) for sides in self.session.plan.layout.grids]
        first = sum(sizes[:grid])
        return order[first : first + sizes[grid]] - first

    def ordered_beside_text(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Return a tensor with the grid's tokens ordered, and text before or after them."""
        if self.session.plan is None or not self.moves_tokens:
            return tensor
        tokens = self.session.plan.layout.grid_tokens
        if self.family.text.where == "first":
            text, grid = tensor.tensor_split([tensor.shape[dim] - tokens], dim)
            return torch.cat([text, self.ordered(grid, dim)], dim)
        grid, text = tensor.tensor_split([tokens], dim)
        return torch.cat([self.ordered(grid, dim), text], dim)

    def own_text(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this process's share of the text tokens along a dimension."""
        return tensor if self.split is None else self.split.own_text(tensor, dim)

    def cut_entering(
        self,
        hidden: torch.Tensor,
        text: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this process's share of the grid's and the text's tokens before the blocks."""
        return hidden, self.own_text(text, 1)

    def restored(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the grid's tokens ``[B, N, C]`` of all processes, in raster order.

        The model may have dropped the first grids, as of earlier frames, or the last ones
        (`PerToken.drops_last_grids`).
        """
        if self.split is not None:
            hidden = self.split.whole_grid(hidden)
        if self.session.tile_order is not None:
            _, inverse = self.session.tile_order
            drops_last = self.family.per_token.drops_last_grids
            dropped = 0 if drops_last else inverse.numel() - hidden.shape[1]
            inverse = inverse[: dropped + hidden.shape[1]]
            inverse = inverse[dropped:] - dropped
            hidden = hidden.index_select(1, inverse.to(hidden.device))
        return hidden

    # Attention.

    def around(self, attend: LayerCall) -> LayerCall:
        """Return the self-attention of a layer with the exchange between processes around it."""
        return attend if self.split is None else functools.partial(self.split.attend, attend)
