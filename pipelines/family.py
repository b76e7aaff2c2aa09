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
    """The half of an adapter that `chipsparse models` and `explain` ask, and planning.

    Attributes:
        transformer_class: name of the class that it serves.
        families: the models of this class and what their pipelines make, for `chipsparse models`.
        sparse_attention: which attention runs sparse, in words.
        sparse_mlp: which feed-forward layers run sparse, in words.
        guidance_argument: argument of the pipelines' call that, above 1, lets each step call the
            transformer once more, without the prompt; None where they never do.
        guides_in_batch: whether in plain pipelines those second calls are no calls of their own,
            but the other half of the batch.
        masked_parts: parts that the family's own pipelines keep from running sparse, and why.
        default_latents: rows and columns of the latents that pipelines make where nobody names a
            size, None where their call has a default for it.
        uncalled_steps: how many of ``num_inference_steps`` do not call the transformer.
        timestep_argument: what the transformer calls its timestep.
        timestep_scale: by what pipelines divide the scheduler's timesteps.
        block_list: what the transformer calls its blocks.
        attention_name: what a block calls its self-attention.
        mlp_name: what a block calls its feed-forward layer.
        mlp_parts: the names of the parts of its own feed-forward class; None where it has
            diffusers' ``FeedForward``.
        mlp_sees_text: see `LayerKind`, as for `mlp_linears` and `projections`.
        tags_over_masks: whether the tag takes the place of a mask that the model passes, because it
            lets everything through; else such calls are left alone.
        own_processors: by the class of a processor that does not dispatch its attention, what makes
            one of it that does, with an ``_attention_backend``.
        dense_arguments: arguments of a call whose attention cannot run sparse, and why.
        text_place: where the text stands in the sequence, or that it is in cross-attention.
        shares_keys: whether several heads of the queries may share a key, which our kernels want
            repeated.
        exact_text: see `ModelLayout`.
        token_patch: frames, rows and columns of latents in a token, where pipelines pack them; None
            where the model's ``patch_size`` tells.
        embedding_name: what the transformer calls the module that makes tokens of latents, behind
            which they are put in order; empty where they are as they enter.
        rotary_name: what it calls that which makes rotary embeddings of the tokens in raster order.
        last_name: what it calls that which takes the tokens last, in raster order again.
        drops_last_grids: whether the model drops the grids behind the first one, as of reference
            images, before what takes the tokens last.
        rotary_dim: dimension of the tokens in the tensors that the rotary embedding returns.
        shares_tokens: whether several processes can share its tokens: its hooks cut and gather what
            they put in order. Not inherited, since it is to be tested for each.
        why_whole: why not, where that is known.
        shares_guidance: whether guidance branches can be on different processes: its pipelines say
            before the first call that they guide, by two calls per step. Not inherited.
        cuts_at_blocks: whether the text is cut for several processes in front of the blocks; False
            where it is cut as it enters the model, or is in cross-attention.
        needs_text: whether its blocks do not run without text tokens.
    """

    transformer_class: ClassVar[str]
    families: ClassVar[str] = ""
    sparse_attention: ClassVar[str] = "self-attention"
    sparse_mlp: ClassVar[str] = "feed-forward"
    guidance_argument: ClassVar[str | None] = "guidance_scale"
    guides_in_batch: ClassVar[bool] = False
    masked_parts: ClassVar[Mapping[Part, str]] = MappingProxyType({})
    default_latents: ClassVar[int | None] = None
    uncalled_steps: ClassVar[int] = 0
    timestep_argument: ClassVar[str] = "timestep"
    timestep_scale: ClassVar[int] = 1
    block_list: ClassVar[str] = "transformer_blocks"
    attention_name: ClassVar[str] = "attn"
    mlp_name: ClassVar[str] = "ff"
    mlp_parts: ClassVar[MLPParts | None] = None
    mlp_sees_text: ClassVar[bool] = True
    mlp_linears: ClassVar[int] = 2
    projections: ClassVar[int] = 4
    tags_over_masks: ClassVar[bool] = False
    own_processors: ClassVar[Mapping[type, Callable[[Any], Any]]] = MappingProxyType({})
    dense_arguments: ClassVar[Mapping[str, str]] = MappingProxyType({})
    text_place: ClassVar[Literal["first", "last", "cross-attention"]] = "last"
    shares_keys: ClassVar[bool] = False
    exact_text: ClassVar[bool] = False
    token_patch: ClassVar[Grid | None] = None
    embedding_name: ClassVar[str] = ""
    rotary_name: ClassVar[str] = ""
    last_name: ClassVar[str] = ""
    drops_last_grids: ClassVar[bool] = False
    rotary_dim: ClassVar[int] = 0
    shares_tokens: ClassVar[bool] = False
    why_whole: ClassVar[str] = "its tokens cannot be shared yet"
    shares_guidance: ClassVar[bool] = False
    cuts_at_blocks: ClassVar[bool] = False
    needs_text: ClassVar[bool] = False

    @classmethod
    def kinds(cls, config: Mapping[str, Any]) -> tuple[LayerKind, ...]:
        """The kinds of its blocks in order; here one, as the class says."""
        layers, width = config["num_layers"], cls.neurons(config)
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
        """Channels of all its heads, side by side."""
        heads, head_dim = cls.heads(config)
        return heads * head_dim

    @classmethod
    def grids(cls, config: Mapping[str, Any], latents: Grid) -> tuple[Grid, ...]:
        """The grids of tokens that it makes of latents with so many frames, rows and columns."""
        return patched(latents, cls.token_patch or patch_of(config))

    @classmethod
    def sizes(
        cls, config: Mapping[str, Any], *, grids: tuple[Grid, ...], text_tokens: int, batch: int
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
        cls, config: Mapping[str, Any], *, latents: Grid, text_tokens: int = 0, batch: int = 1
    ) -> ModelLayout:
        """The sizes of a call for one image or video, known without the model.

        Args:
            config: the transformer's.
            latents: frames, rows and columns of the image or video behind the VAE.
            text_tokens: tokens of the prompt, padding included.
            batch: samples in one call.
        """
        grids, text_tokens = cls.grids(config, latents), cls.planned_text(text_tokens, latents)
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
        """Calls of a step besides the one with the prompt and the one without.

        Args:
            argument: of the pipeline's call, by name; None where it has none.
        """
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
