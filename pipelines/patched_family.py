"""The half of an adapter that knows a model: its modules, its arguments, and its tokens' order."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from diffusers.models.modeling_outputs import Transformer2DModelOutput

from chipsparse.layout import Grid, ModelLayout
from chipsparse.pipelines.bridge import forward_arguments, tagging_hook
from chipsparse.pipelines.denoising_loop import largest, value_passed_as
from chipsparse.pipelines.family import ModelFamily
from chipsparse.pipelines.feed_forward import FeedForwardModule, FeedForwardSite
from chipsparse.pipelines.parallel.split_sequence import SplitSequence
from chipsparse.pipelines.patches import Patches
from chipsparse.skip.position import StepContext
from chipsparse.sparse.session import SparseSession


class PatchedFamily(ModelFamily):
    """Methods that a family overrides where its model differs, and those that its hooks call."""

    transformer: torch.nn.Module
    session: SparseSession
    split: SplitSequence | None  # this process's share of the tokens; None: all of them
    _patches: Patches
    _argument_names: tuple[str, ...]

    @property
    def _model(self) -> Any:
        return cast(Any, self.transformer)

    # The model and its calls.

    def blocks(self) -> list[Any]:
        """The transformer blocks with self-attention, in layer order."""
        return list(getattr(self._model, self.block_list))

    def self_attentions(self) -> list[Any]:
        """The self-attention modules, in layer order, each with a ``processor``."""
        return [getattr(block, self.attention_name) for block in self.blocks()]

    def feed_forwards(self) -> list[FeedForwardSite]:
        return [FeedForwardModule(block, self.mlp_name, self.mlp_parts) for block in self.blocks()]

    def layout(self, arguments: dict[str, Any]) -> ModelLayout:
        """The sizes of a call with these arguments of the transformer's ``forward``."""
        grids = self.called_grids(arguments)
        text_tokens = self.text_tokens(arguments)
        batch = len(self.latents(arguments))
        return self.sizes(self._model.config, grids=grids, text_tokens=text_tokens, batch=batch)

    def called_grids(self, arguments: dict[str, Any]) -> tuple[Grid, ...]:
        """The grids of tokens of a call, here of a video or image ``[B, C, (F,) H, W]``."""
        _, _, *frames, rows, columns = self.latents(arguments).shape
        return self.grids(self._model.config, (frames[0] if frames else 1, rows, columns))

    def text_tokens(self, arguments: dict[str, Any]) -> int:
        """The number of text tokens that a call has in the sequence."""
        if self.text_place == "cross-attention":
            return 0
        return arguments["encoder_hidden_states"].shape[1]

    def install_tile_order(self) -> None:
        """Hooks the places where tokens enter, rotary embeddings are made, and tokens leave."""
        add = self._model.register_forward_pre_hook
        self._patches.add_hook(add(self._change_inputs, with_kwargs=True))
        if self.embedding_name:
            self.hook_output(self.embedding_name, self.order_embedded)
        if self.rotary_name:
            self.hook_output(self.rotary_name, self.ordered_rotary)
        if self.last_name:
            last = getattr(self._model, self.last_name)
            self._patches.add_hook(last.register_forward_pre_hook(self.restore_order))

    def hook_output(self, name: str, hook: Callable[..., Any], **options: Any) -> None:
        """Adds a forward hook to one of the transformer's modules."""
        module = self._model.get_submodule(name)
        self._patches.add_hook(module.register_forward_hook(hook, **options))

    def hook_attention(self, module: Any) -> None:
        """Lets a self-attention module be called with its tag as the attention mask."""
        hook = tagging_hook(forward_arguments(module), over_masks=self.tags_over_masks)
        self._patches.add_hook(module.register_forward_pre_hook(hook, with_kwargs=True))

    def scheduled_timestep(self, timestep: Any, schedule: Any) -> float:
        """The scheduler's own value of the timestep that the transformer is called with.

        Only asked for where the scheduler does not tell its step; may wait for the device. Without
        a schedule, one that rises is negative, so that it falls.
        """
        value = value_passed_as(timestep, schedule, lambda values: values / self.timestep_scale)
        if value is not None:
            return value
        return largest(timestep) * (-1 if self.timestep_rises else self.timestep_scale)

    def row_of_loop(self) -> tuple[int | None, int | None]:
        """Step and number of steps of a loop whose steps are not the scheduler's, else None."""
        return None, None

    def own_timestep(self, arguments: dict[str, Any]) -> Any:
        """The timestep of what a call denoises, where it has others besides; see above."""
        return arguments[self.timestep_argument]

    def latents(self, arguments: dict[str, Any]) -> torch.Tensor:
        """The argument that the transformer is to denoise, as one tensor of any shape."""
        return arguments["hidden_states"]

    def notes(self, arguments: dict[str, Any]) -> list[str]:
        """Notes for the report on a call with these arguments, besides what runs dense."""
        return []

    def why_attention_is_dense(self, arguments: dict[str, Any]) -> str | None:
        """Return why no attention of a call with these arguments can run sparse, or None."""
        reasons = self.dense_arguments.items()
        return next((why for name, why in reasons if arguments.get(name) is not None), None)

    def needs_mask(self, arguments: dict[str, Any]) -> bool:
        """Return whether attention of such a call runs with a mask of the model's own."""
        return self.why_attention_is_dense(arguments) is not None

    def masks_text(self, arguments: dict[str, Any]) -> bool:
        """Return whether the model masks padded text in a call for which ours is cut instead."""
        return False

    def knows(self, context: StepContext, arguments: dict[str, Any]) -> bool:
        """Return whether `layout` can tell the sizes of a call; if not, it runs as the model's."""
        return True

    def observe(self, context: StepContext, arguments: dict[str, Any]) -> None:
        """Prepares a call that is not known, and reports why it runs as the model's."""

    def named(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a call of the transformer, by name."""
        if len(args) > len(self._argument_names):
            raise ValueError(
                f"this {type(self.transformer).__name__} has a forward() that does not name all "
                f"{len(args)} positional arguments it is called with; pass them by keyword",
            )
        return {**dict(zip(self._argument_names, args, strict=False)), **kwargs}

    def held_output(self, result: Any) -> torch.Tensor:
        """All of the transformer's output in one tensor, of which skipped calls are made."""
        return result[0]

    def wrap_output(self, output: Any, arguments: dict[str, Any]) -> Any:
        """The transformer's output from what is held of it, as ``return_dict`` asks."""
        if not arguments.get("return_dict", True):
            return (output,)
        return Transformer2DModelOutput(sample=output)

    # Tile order, for the hooks that `install_tile_order` installs.

    def _change_inputs(self, _module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Forward pre-hook of the transformer: orders its inputs where its layers are ours."""
        if not (self.session.attends or self.split is not None):
            return None
        arguments = self.named(args, kwargs)
        self.order_inputs(arguments)
        return (), arguments

    def replace_method(self, name: str, method: Callable[..., Any]) -> None:
        """Puts a method in the place of the model's own, which it gets before the arguments."""
        stock = getattr(self._model, name)
        replaced = functools.wraps(stock)(functools.partial(method, stock))
        self._patches.set_attribute(self._model, name, replaced)

    @property
    def moves_tokens(self) -> bool:
        """True if the tokens of the open call are put in order, or cut for several processes."""
        return self.session.tile_order is not None or self.split is not None

    def ordered(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """This process's share of the grid's tokens along a dimension, in the session's order."""
        if self.session.tile_order is not None:
            order, _ = self.session.tile_order
            tensor = tensor.index_select(dim, order.to(tensor.device))
        return tensor if self.split is None else self.split.own_grid(tensor, dim)

    def grid_order(self, grid: int) -> torch.Tensor | None:
        """The order of the tokens of one grid, int64 ``[N]``; None: unchanged."""
        if self.session.tile_order is None or self.session.plan is None:
            return None
        order, _ = self.session.tile_order
        sizes = [math.prod(sides) for sides in self.session.plan.layout.grids]
        first = sum(sizes[:grid])
        return order[first : first + sizes[grid]] - first

    def ordered_beside_text(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """A tensor with the grid's tokens, and text before or behind them, along a dimension."""
        if self.session.plan is None or not self.moves_tokens:
            return tensor
        tokens = self.session.plan.layout.grid_tokens
        if self.text_place == "first":
            text, grid = tensor.tensor_split([tensor.shape[dim] - tokens], dim)
            return torch.cat([text, self.ordered(grid, dim)], dim)
        grid, text = tensor.tensor_split([tokens], dim)
        return torch.cat([self.ordered(grid, dim), text], dim)

    def order_inputs(self, arguments: dict[str, Any]) -> None:
        """Puts what the transformer is given for each token in order: the `token_arguments`."""
        for name, dim in self.token_arguments.items():
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
        return tuple(self.ordered(part, self.rotary_dim) for part in output)

    def own_text(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        return tensor if self.split is None else self.split.own_text(tensor, dim)

    def cut_entering(
        self,
        hidden: torch.Tensor,
        text: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """This process's share of the grid's and the text's tokens in front of the blocks."""
        return hidden, self.own_text(text, 1)

    def restore_order(self, _module: Any, args: tuple[torch.Tensor, ...]) -> Any:
        """Forward pre-hook of what takes the grid's tokens last, in raster order."""
        hidden, *rest = args
        return (self.restored(hidden), *rest)

    def restored(self, hidden: torch.Tensor) -> torch.Tensor:
        """The grid's tokens ``[B, N, C]`` of all processes, in raster order.

        The model may have dropped the first grids, as of earlier frames, or the last ones
        (`drops_last_grids`).
        """
        if self.split is not None:
            hidden = self.split.whole_grid(hidden)
        if self.session.tile_order is not None:
            _, inverse = self.session.tile_order
            dropped = 0 if self.drops_last_grids else inverse.numel() - hidden.shape[1]
            inverse = inverse[: dropped + hidden.shape[1]]
            inverse = inverse[dropped:] - dropped
            hidden = hidden.index_select(1, inverse.to(hidden.device))
        return hidden
