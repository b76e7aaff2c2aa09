"""Facts about a family of models that need no loaded model: names, sizes, text, guidance."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from chipsparse.config import Part
from chipsparse.layout import Grid, LayerKind, ModelLayout
from chipsparse.pipelines.feed_forward_forms import MLPParts
from chipsparse.pipelines.token_grids import patch_of, patched

Config = Mapping[str, Any]  # a transformer's

MLP_RATIO = 4
TRUE_GUIDANCE = "true_cfg_scale"  # of models that have a scale distilled into them as well
NEGATIVE = ("negative_prompt", "negative_prompt_embeds")  # without either there is no true guidance


# Layers, heads and grids, which most families compute from the same fields of the config.


def heads(config: Config) -> tuple[int, int]:
    """Return the number of attention heads, and the channels of each."""
    if "n_heads" in config:  # and the channels of all together
        return config["n_heads"], config["dim"] // config["n_heads"]
    return config["num_attention_heads"], config["attention_head_dim"]


def channels(config: Config) -> int:
    """Return the channels of all attention heads."""
    count, head_dim = heads(config)
    return count * head_dim


def neurons(config: Config) -> int:
    """Return the neurons of a feed-forward layer; some models fix the ratio in their code."""
    if "ffn_dim" in config:
        return int(config["ffn_dim"])
    return int(channels(config) * config.get("mlp_ratio", MLP_RATIO))


@dataclass(frozen=True)
class SameBlocks:
    """The kinds of a model whose blocks are all alike; `LayerKind` explains the fields."""

    name: str = "block"
    mlp_sees_text: bool = True
    mlp_linears: int = 2
    projections: int = 4
    count: str = "num_layers"  # the field of the config with the number of blocks
    neurons: Callable[[Config], int] = neurons

    def __call__(self, config: Config) -> tuple[LayerKind, ...]:
        """Return the one kind of the blocks."""
        layers = config[self.count]
        width = self.neurons(config)
        kind = LayerKind(
            self.name,
            layers,
            width,
            self.mlp_sees_text,
            self.mlp_linears,
            self.projections,
        )
        return (kind,)


@dataclass(frozen=True)
class Patches:
    """The grids of a model that makes one grid of patches of the latents."""

    patch: Grid | None = None  # frames, rows and columns; None: the config's `patch_size`

    def __call__(self, config: Config, latents: Grid) -> tuple[Grid, ...]:
        """Return the grid of tokens of latents with these frames, rows and columns."""
        return patched(latents, self.patch or patch_of(config))


# What the fields of a family hold.


@dataclass(frozen=True)
class SparseParts:
    """The parts of a model that run sparse, in words."""

    attention: str = "self-attention"
    mlp: str = "feed-forward"
    # Parts that the family's own pipelines keep from running sparse, and why.
    masked: Mapping[Part, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ModuleNames:
    """Names of modules: of the transformer, then of a block."""

    blocks: tuple[str, ...] = ("transformer_blocks",)  # lists of blocks, in layer order
    embedding: str = ""  # makes tokens of latents; empty: tokens are what enters
    rotary: str = ""  # makes rotary embeddings of the tokens in raster order
    last: str = ""  # takes the tokens last, in raster order again
    dtype: str = ""  # its weights have the dtype of the blocks' inputs; empty: the latents have it
    inner: str = ""  # the module of a block that has its layers; empty: the block itself
    attention: str = "attn"  # self-attention
    mlp: str = "ff"  # the feed-forward layer
    mlp_parts: MLPParts | None = None  # of a class of its own; None: diffusers'


@dataclass(frozen=True)
class AttentionFacts:
    """How self-attention of a model leads to ours, and which calls keep their own."""

    # Where the tag travels: as the attention mask, or as the ``_parallel_config`` of a processor,
    # for processors that take no mask or change it.
    tag: Literal["mask", "processor"] = "mask"
    # True if the tag replaces masks that calls pass, because they let everything through; else
    # calls with a mask are left alone.
    tags_over_masks: bool = False
    # By the class of a processor that does not dispatch tagged attention: its mixin that does.
    processors: Mapping[str, type] = field(default_factory=dict)
    # True if several heads of queries share a key, which our kernels want repeated.
    shares_keys: bool = False
    # Arguments of a call whose attention cannot run sparse, and why.
    dense_arguments: Mapping[str, str] = field(default_factory=dict)


def _as_given(text_tokens: int, _latents: Grid) -> int:
    return text_tokens


def _all_tokens(_config: Config, _grids: tuple[Grid, ...], text_tokens: int) -> int:
    return text_tokens


@dataclass(frozen=True)
class TextPlace:
    """The position of the text in the sequence, and its number of tokens."""

    where: Literal["first", "last", "cross-attention"] = "last"  # in the sequence
    exact: bool = False  # see `ModelLayout.exact_text`
    # The tokens besides those of the grids, of a prompt with so many and of such latents.
    planned: Callable[[int, Grid], int] = _as_given
    # The tokens that the model makes of those in the sequence.
    counted: Callable[[Config, tuple[Grid, ...], int], int] = _all_tokens
    # True if several processes cut the text before the blocks; else as it enters the model, or not.
    cut_at_blocks: bool = False
    needed: bool = False  # the blocks do not run without text tokens


def _told_by_property(pipe: Any) -> bool | None:
    told = getattr(pipe, "do_classifier_free_guidance", None)
    return None if told is None else bool(told)


def _no_branches(_argument: Callable[[str], Any]) -> int:
    return 0


@dataclass(frozen=True)
class GuidanceFacts:
    """How the pipelines of a family guide."""

    # Argument of the pipelines' call that, above 1, lets each step call the transformer once more,
    # without the prompt; None: they never do.
    argument: str | None = "guidance_scale"
    # True if plain pipelines double the batch instead of calling the transformer once more.
    in_batch: bool = False
    # Whether a pipeline guides, by what it says itself; None where it says nothing.
    told: Callable[[Any], bool | None] = _told_by_property
    # Calls of a step besides those with and without the prompt, by the pipeline's options.
    further_branches: Callable[[Callable[[str], Any]], int] = _no_branches

    def is_guided(self, pipe: Any, arguments: Mapping[str, Any]) -> bool:
        """Return whether a pipeline also computes the transformer without the prompt.

        Some pipelines tell. For others the arguments of their call decide, if they are known: a
        scale above 1 and, for true guidance, a negative prompt or its embeddings.
        """
        told = self.told(pipe)
        if told is not None:
            return told
        scale = arguments.get(self.argument or "")
        if not isinstance(scale, (int, float)) or scale <= 1:
            return False
        return self.argument != TRUE_GUIDANCE or any(
            arguments.get(name) is not None for name in NEGATIVE
        )


@dataclass(frozen=True)
class TimestepFacts:
    """The timesteps that a transformer is called with."""

    argument: str = "timestep"  # of the transformer
    scale: int = 1  # by which pipelines divide the scheduler's timesteps
    rises: bool = False  # over a generation, where that of others falls
    uncalled_steps: int = 0  # of `num_inference_steps`, that do not call the transformer


@dataclass(frozen=True)
class PerToken:
    """The inputs with a value for each token, which are ordered with the tokens."""

    # Arguments of a call with something for each token of the grids, one tensor or several, and
    # the dimension that the tokens are along.
    arguments: Mapping[str, int] = field(default_factory=dict)
    rotary_dim: int = 0  # the same in the tensors that the rotary embedding returns
    # True if the grids after the first one, as of reference images, leave before the last module.
    drops_last_grids: bool = False


def _no_reason(_config: Config) -> str | None:
    return None


@dataclass(frozen=True)
class Sharing:
    """The ways in which several processes may share a model; each is to be tested for the class."""

    tokens: bool = False  # its hooks cut and gather the tokens that they order
    why_whole: str = "its tokens cannot be shared yet"  # the reason without it
    why_not: Callable[[Config], str | None] = _no_reason  # of some configs all the same
    # Guidance is two calls per step, which its pipelines say before the first one.
    guidance: bool = False


@dataclass(frozen=True, kw_only=True)
class FamilyFacts:
    """All that `chipsparse models`, `explain` and planning ask of a family."""

    transformer_class: str  # name of the class of diffusers
    title: str  # the models of this class, and what their pipelines make
    sparse: SparseParts = SparseParts()
    modules: ModuleNames = ModuleNames()
    attention: AttentionFacts = AttentionFacts()
    text: TextPlace = TextPlace()
    guidance: GuidanceFacts = GuidanceFacts()
    timestep: TimestepFacts = TimestepFacts()
    per_token: PerToken = PerToken()
    sharing: Sharing = Sharing()
    # Rows and columns of latents where nobody names a size; None: pipelines have a default for it.
    default_latents: int | None = None
    kinds: Callable[[Config], tuple[LayerKind, ...]] = SameBlocks()  # of its blocks, in order
    heads: Callable[[Config], tuple[int, int]] = heads
    # The grids of tokens of latents with these frames, rows and columns.
    grids: Callable[[Config, Grid], tuple[Grid, ...]] = Patches()

    def sizes(
        self,
        config: Config,
        *,
        grids: tuple[Grid, ...],
        text_tokens: int,
        batch: int,
    ) -> ModelLayout:
        """Return the sizes of a call with these grids of tokens and this number of text tokens."""
        count, head_dim = self.heads(config)
        in_sequence = self.text.where != "cross-attention"
        return ModelLayout(
            kinds=self.kinds(config),
            heads=count,
            head_dim=head_dim,
            batch=batch,
            grids=grids,
            text_tokens=self.text.counted(config, grids, text_tokens) if in_sequence else 0,
            text_first=self.text.where == "first",
            exact_text=self.text.exact,
            hidden_size=config.get("hidden_size"),
        )

    def planned_layout(
        self,
        config: Config,
        *,
        latents: Grid,
        text_tokens: int = 0,
        batch: int = 1,
    ) -> ModelLayout:
        """Return the sizes of a call of an unloaded model.

        Args:
            config: the transformer's.
            latents: frames, rows and columns after the VAE.
            text_tokens: those of the prompt, with padding.
            batch: samples in one call.
        """
        grids = self.grids(config, latents)
        text_tokens = self.text.planned(text_tokens, latents)
        return self.sizes(config, grids=grids, text_tokens=text_tokens, batch=batch)

    def why_not_split(self, config: Config) -> str | None:
        """Return why several processes cannot share the tokens of such a transformer, or None."""
        reason = self.sharing.why_not(config)
        if reason is None and not self.sharing.tokens:
            reason = self.sharing.why_whole
        return reason

    def why_guidance_stays(self) -> str | None:
        """Return why guidance branches cannot be on different processes, or None."""
        if self.sharing.guidance:
            return None
        return (
            f"the pipelines of a {self.transformer_class} do not say before the first call that "
            "they guide by calls of their own, so guidance branches cannot be on different "
            "processes"
        )
