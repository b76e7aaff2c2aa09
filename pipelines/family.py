"""Facts about a family of models without having one: names, sizes, and what runs sparse."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from chipsparse.config import Part
from chipsparse.layout import Grid, LayerKind, ModelLayout
from chipsparse.pipelines.feed_forward_forms import MLPParts
from chipsparse.pipelines.token_grids import patch_of, patched

MLP_RATIO = 4
TRUE_GUIDANCE = "true_cfg_scale"  # of models that have a scale distilled into them as well
NEGATIVE = ("negative_prompt", "negative_prompt_embeds")  # without either there is no true guidance


class ModelFamily:
    """The half of an adapter that `chipsparse models` and `explain` ask, and planning."""

    transformer_class: ClassVar[str]  # name of the class of diffusers that it serves
    # In words: the models of this class and what their pipelines make, and what runs sparse.
    families: ClassVar[str] = ""
    sparse_attention: ClassVar[str] = "self-attention"
    sparse_mlp: ClassVar[str] = "feed-forward"
    # Parts that the family's own pipelines keep from running sparse, and why.
    masked_parts: ClassVar[Mapping[Part, str]] = MappingProxyType({})

    # Names of modules: in the transformer, and of a block.
    block_list: ClassVar[str] = "transformer_blocks"
    embedding_name: ClassVar[str] = ""  # makes tokens of latents; empty: tokens are what enters
    rotary_name: ClassVar[str] = ""  # makes rotary embeddings of the tokens in raster order
    last_name: ClassVar[str] = ""  # takes the tokens last, in raster order again
    attention_name: ClassVar[str] = "attn"  # self-attention
    mlp_name: ClassVar[str] = "ff"  # the feed-forward layer
    mlp_parts: ClassVar[MLPParts | None] = None  # of a class of its own; None: diffusers'

    # Layers. `LayerKind` explains the first three.
    mlp_sees_text: ClassVar[bool] = True
    mlp_linears: ClassVar[int] = 2
    projections: ClassVar[int] = 4
    # True if several heads of queries share a key, which our kernels want repeated.
    shares_keys: ClassVar[bool] = False
    # True if the tag replaces masks that calls pass, because they let everything through; else
    # calls with a mask are left alone.
    tags_over_masks: ClassVar[bool] = False
    # By the class of a processor that does not dispatch tagged attention: its mixin that does.
    own_processors: ClassVar[Mapping[str, type]] = MappingProxyType({})
    # Arguments of a call whose attention cannot run sparse, and why.
    dense_arguments: ClassVar[Mapping[str, str]] = MappingProxyType({})

    # Text and guidance.
    text_place: ClassVar[Literal["first", "last", "cross-attention"]] = "last"  # in the sequence
    exact_text: ClassVar[bool] = False  # see `ModelLayout`
    # Argument of the pipelines' call that, above 1, lets each step call the transformer once more,
    # without the prompt; None: they never do.
    guidance_argument: ClassVar[str | None] = "guidance_scale"
    # True if plain pipelines double the batch instead of calling the transformer once more.
    guides_in_batch: ClassVar[bool] = False

    # Steps, tokens and their order.
    timestep_argument: ClassVar[str] = "timestep"  # of the transformer
    timestep_scale: ClassVar[int] = 1  # by which pipelines divide the scheduler's timesteps
    timestep_rises: ClassVar[bool] = False  # over a generation, where that of others falls
    uncalled_steps: ClassVar[int] = 0  # of `num_inference_steps`, that do not call the transformer
    # Rows and columns of latents where nobody names a size; None: pipelines have a default for it.
    default_latents: ClassVar[int | None] = None
    # Frames, rows and columns of latents in a token, where pipelines pack them; None: the model's
    # `patch_size`.
    token_patch: ClassVar[Grid | None] = None
    rotary_dim: ClassVar[int] = 0  # of the tokens, in the tensors that the rotary embedding returns
    # Arguments of a call with something for each token of the grids, one tensor or several, and
    # the dimension that the tokens are along.
    token_arguments: ClassVar[Mapping[str, int]] = MappingProxyType({})
    # True if the grids behind the first one, as of reference images, leave before `last_name`.
    drops_last_grids: ClassVar[bool] = False

    # Several processes. The two permissions are not inherited: each class is to be tested.
    shares_tokens: ClassVar[bool] = False  # its hooks cut and gather the tokens that they order
    why_whole: ClassVar[str] = "its tokens cannot be shared yet"  # the reason without it
    # Guidance is two calls per step, which its pipelines say before the first one.
    shares_guidance: ClassVar[bool] = False
    # True if the text is cut before the blocks; else as it enters the model, or not at all.
    cuts_at_blocks: ClassVar[bool] = False
    needs_text: ClassVar[bool] = False  # its blocks do not run without text tokens

    @classmethod
    def kinds(cls, config: Mapping[str, Any]) -> tuple[LayerKind, ...]:
        """The kinds of its blocks in order; here one, as the class says."""
        layers = config["num_layers"]
        width = cls.neurons(config)
        return (
            LayerKind("block", layers, width, cls.mlp_sees_text, cls.mlp_linears, cls.projections),
        )

    @classmethod
    def neurons(cls, config: Mapping[str, Any]) -> int:
        """Neurons of a feed-forward layer; the ratio is fixed in the code of some models."""
        if "ffn_dim" in config:
            return int(config["ffn_dim"])
        return int(cls.channels(config) * config.get("mlp_ratio", MLP_RATIO))

    @classmethod
    def heads(cls, config: Mapping[str, Any]) -> tuple[int, int]:
        """Its attention heads, and channels of each."""
        if "n_heads" in config:  # and the channels of all together
            return config["n_heads"], config["dim"] // config["n_heads"]
        return config["num_attention_heads"], config["attention_head_dim"]

    @classmethod
    def channels(cls, config: Mapping[str, Any]) -> int:
        heads, head_dim = cls.heads(config)
        return heads * head_dim

    @classmethod
    def grids(cls, config: Mapping[str, Any], latents: Grid) -> tuple[Grid, ...]:
        """The grids of tokens that it makes of latents with so many frames, rows and columns."""
        return patched(latents, cls.token_patch or patch_of(config))

    @classmethod
    def sizes(
        cls,
        config: Mapping[str, Any],
        *,
        grids: tuple[Grid, ...],
        text_tokens: int,
        batch: int,
    ) -> ModelLayout:
        """The sizes of a call with these grids of tokens, and so many of text."""
        heads, head_dim = cls.heads(config)
        return ModelLayout(
            kinds=cls.kinds(config),
            heads=heads,
            head_dim=head_dim,
            batch=batch,
            grids=grids,
            text_tokens=0 if cls.text_place == "cross-attention" else text_tokens,
            text_first=cls.text_place == "first",
            exact_text=cls.exact_text,
            hidden_size=config.get("hidden_size"),
        )

    @classmethod
    def planned_layout(
        cls,
        config: Mapping[str, Any],
        *,
        latents: Grid,
        text_tokens: int = 0,
        batch: int = 1,
    ) -> ModelLayout:
        """The sizes of a call of an unloaded model: latents behind the VAE, text with padding."""
        grids = cls.grids(config, latents)
        text_tokens = cls.planned_text(text_tokens, latents)
        return cls.sizes(config, grids=grids, text_tokens=text_tokens, batch=batch)

    @classmethod
    def planned_text(cls, text_tokens: int, latents: Grid) -> int:
        """The tokens beside those of the grids, of a prompt with so many and of such latents."""
        return text_tokens

    @classmethod
    def is_guided(cls, pipe: Any, arguments: Mapping[str, Any]) -> bool:
        """Return whether a pipeline also computes the transformer without the prompt.

        Some tell. Of others the arguments of their call decide, as far as these are known: a scale
        above 1 and, for true guidance, what to guide away from.
        """
        told = getattr(pipe, "do_classifier_free_guidance", None)
        if told is not None:
            return bool(told)
        scale = arguments.get(cls.guidance_argument or "")
        if not isinstance(scale, (int, float)) or scale <= 1:
            return False
        return cls.guidance_argument != TRUE_GUIDANCE or any(
            arguments.get(name) is not None for name in NEGATIVE
        )

    @classmethod
    def further_branches(cls, argument: Callable[[str], Any]) -> int:
        """Calls of a step besides those with and without the prompt, by the pipeline's options."""
        return 0

    @classmethod
    def why_not_split(cls, config: Mapping[str, Any]) -> str | None:
        """Return why several processes cannot share the tokens of such a transformer, or None."""
        return None if vars(cls).get("shares_tokens", False) else cls.why_whole

    @classmethod
    def why_guidance_stays(cls) -> str | None:
        """Return why guidance branches cannot be on different processes, or None."""
        if vars(cls).get("shares_guidance", False):
            return None
        return (
            f"the pipelines of a {cls.transformer_class} do not say before the first call that "
            "they guide by calls of their own, so guidance branches cannot be on different "
            "processes"
        )
