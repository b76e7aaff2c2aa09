"""Profiles: a sparsity config, or several named ones, with generation settings, as one YAML file.

A profile is found by the transformer's class in ``assets/profiles``, unless the model's folder
brings its own ``chipsparse.yaml``.

The named configs are its qualities: how much of a generation is computed, for people who do not
tune. Each is put together from three mappings, the later going before the earlier: what
``assets/qualities.yaml`` says for its name, the profile's ``sparsity``, which all have in common,
and what the profile says for its name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn

import yaml

from chipsparse.common.errors import UserError
from chipsparse.common.text_files import read_text
from chipsparse.common.validation import Validated, build, option, shown
from chipsparse.config import SparsityConfig
from chipsparse.profiles.tuned_range import TunedFor

Medium = Literal["video", "image"]
ASSETS = Path(__file__).parents[1] / "assets"
PROFILES = ASSETS / "profiles"
QUALITIES_FILE = ASSETS / "qualities.yaml"
IMAGES = "images"  # key of that file: what images differ in
ALL = "all"  # key below it: what all images have
BUNDLED_MODELS = ("tiny-wan", "tiny-flux")  # the first one is the command's default
MODEL_PROFILE_NAME = "chipsparse.yaml"
LARGEST_FILE_BYTES = 1 << 20
MOST_STEPS = 1000  # the most that a schedule of diffusers tells apart
QUALITIES = {
    "faithful": "closest to dense",
    "balanced": "the default",
    "fast": "further from dense",
    "draft": "the fastest, to see what comes",
    "chipmunk": "few full steps, all others sparse: the schedule that was published first",
}
FORMER_QUALITIES = {"published": "chipmunk"}
DEFAULT_QUALITY = "balanced"
WHOLE = "schedule"  # replaced, not merged: its forms exclude each other


@dataclass(frozen=True, repr=False)
class GenerationDefaults(Validated):
    """Settings of the pipeline call that the profile is meant for; null: the pipeline's own."""

    height: int | None = option(None, "height in pixels", minimum=1)
    width: int | None = option(None, "width in pixels", minimum=1)
    num_frames: int | None = option(None, "frames of the video", minimum=1)
    num_inference_steps: int | None = option(None, "denoising steps", minimum=1, maximum=MOST_STEPS)
    guidance_scale: float | None = option(
        None,
        "classifier-free guidance, or the strength given to a guidance-distilled model",
        minimum=0.0,
    )
    true_cfg_scale: float | None = option(
        None,
        "classifier-free guidance of pipelines that give guidance_scale another meaning (FLUX)",
        minimum=0.0,
    )
    max_sequence_length: int | None = option(None, "text tokens, padding included", minimum=1)


@dataclass(frozen=True, repr=False)
class _ProfileFile(Validated):
    model_class: str = option("", "class of the transformer, such as WanTransformer3DModel")
    description: str = option("", "what the profile is for and what was measured")
    generation: GenerationDefaults = option(GenerationDefaults(), "settings of the pipeline call")
    sparsity: SparsityConfig = option(
        SparsityConfig(),
        "what is computed; where there are qualities, what they have in common",
    )
    medium: Medium = option("video", "whose named qualities it has: those of videos or of images")
    qualities: dict[str, Any] | None = option(
        None,
        "by name, the fields of sparsity in which a quality differs; null: it has none",
    )
    tuned: TunedFor | None = option(None, "what it was tuned for and measured with")


@dataclass(frozen=True)
class Profile:
    """A loaded profile."""

    model_class: str  # the transformer class that it is for
    description: str  # one sentence for people
    generation: GenerationDefaults  # settings of the pipeline call
    sparsity: SparsityConfig  # what is computed: that of the quality, if it is one
    source: str  # the file it came from
    tuned: TunedFor | None = None  # what it was tuned for; None where people wrote it
    quality: str | None = None  # name of the one that is taken; None where none is by default
    qualities: Mapping[str, SparsityConfig] = field(default_factory=dict)
    # By quality, what it is where the profile's writer asks for nothing else.
    bases: Mapping[str, SparsityConfig] = field(default_factory=dict)
    # What is computed where nobody asks for anything else; None: the defaults of a config.
    base: SparsityConfig | None = None
    instead: str | None = None  # why it takes the place of another profile, one sentence

    def __repr__(self) -> str:
        return f"<Profile for {self.model_class or 'any model'} from {self.source}>"

    def serves(self, transformer_class: str) -> bool:
        """Return True for models of this class; a profile that names no class is for all."""
        return self.model_class in ("", transformer_class)

    @property
    def is_general(self) -> bool:
        """True for the profile of models that have none."""
        return Path(self.source).resolve() == QUALITIES_FILE.resolve()

    def of_quality(self, name: str) -> Profile:
        """Return the same profile with another of its qualities taken.

        Raises:
            ValueError: if it has none of this name; the message names those that there are.
        """
        check_quality(name)
        if not self.qualities:
            raise ValueError(f"{self.source} does not say what {name} is: it has no qualities")
        return dataclasses.replace(
            self,
            quality=name,
            sparsity=self.qualities[name],
            base=self.bases.get(name),
        )

    def for_steps(self, steps: int | None, *, experts: int = 1) -> Profile:
        """Return the profile for a number of steps (None: as many as the profile says).

        One that was tuned for more than twice as many lists steps that are never reached. The
        default quality of its model class, which knows few steps, is taken in its place.
        """
        tuned = None if self.tuned is None else self.tuned.num_inference_steps
        if steps is None or tuned is None or 2 * steps >= tuned:
            return self
        known = self.model_class in profile_classes()
        other = (
            find_profile(None, self.model_class, experts=experts) if known else default_profile()
        )
        return dataclasses.replace(
            other,
            generation=self.generation,
            instead=f"{self.source} was tuned for {tuned} steps and is not used for {steps}: "
            f"{other.quality} of {other.source} is",
        )

    def override(self, values: Mapping[str, Any]) -> Profile:
        """Return the same profile with all qualities changed by `SparsityConfig.override`."""
        return dataclasses.replace(
            self,
            sparsity=self.sparsity.override(values),
            qualities={name: own.override(values) for name, own in self.qualities.items()},
        )


class _ProfileLoader(yaml.SafeLoader):
    """YAML in which no field stands twice, and no alias, which may stand for millions of fields."""

    def compose_mapping_node(self, anchor: dict[Any, yaml.Node]) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        names = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in names:
                    _refuse(f"{key.value} stands twice", key.start_mark)
                names.add(key.value)
        return node

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            _refuse("an alias; write its fields out", self.peek_event().start_mark)
        return super().compose_node(parent, index)


def _refuse(problem: str, mark: yaml.Mark) -> NoReturn:
    raise yaml.MarkedYAMLError(problem=problem, problem_mark=mark)


def load_profile(path: Path | str) -> Profile:
    """Read a profile and take its quality `DEFAULT_QUALITY`, if it has that one.

    Raises:
        ValueError: if the file is missing, is a pipe, is not YAML, names a field twice, or
            has an unknown or ill-typed field; the message names the file, the field's path and what
            is allowed.
    """
    data = _read(Path(path))
    if Path(path).resolve() == QUALITIES_FILE.resolve():
        del data[IMAGES]
    try:
        parsed = build(_ProfileFile, data)
        qualities: dict[str, SparsityConfig] = {}
        bases: dict[str, SparsityConfig] = {}
        if parsed.qualities is not None:
            common = data.get("sparsity") or {}
            usual = usual_qualities(parsed.medium)
            qualities, bases = _read_qualities(parsed.qualities, common, usual)
        if Path(path).resolve().is_relative_to(ASSETS.resolve()):  # where its user asks for nothing
            bases = qualities
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    profile = Profile(
        parsed.model_class,
        parsed.description,
        parsed.generation,
        parsed.sparsity,
        str(path),
        parsed.tuned,
        qualities=qualities,
        bases=bases,
        base=None if parsed.tuned is None else parsed.sparsity,
    )
    return profile.of_quality(DEFAULT_QUALITY) if qualities else profile


def check_quality(name: str) -> None:
    """Raises `ValueError`, with the known names, for one that no profile can have."""
    if isinstance(name, str) and name in FORMER_QUALITIES:
        raise ValueError(f"quality {name} is now {FORMER_QUALITIES[name]}")
    if not isinstance(name, str) or name not in QUALITIES:
        raise ValueError(f"there is no quality {shown(name)}; known are {', '.join(QUALITIES)}")


def usual_qualities(medium: Medium) -> dict[str, dict[str, Any]]:
    """Return the fields of each quality for models of a medium, whatever their profiles say."""
    data = _read(QUALITIES_FILE)
    if medium == "video":
        return dict(data["qualities"])
    others = data[IMAGES]
    return {
        name: _merged(_merged(fields, others[ALL]), others.get(name, {}))
        for name, fields in data["qualities"].items()
    }


def _read_qualities(
    differing: Mapping[str, Any],
    common: Mapping[str, Any],
    usually: Mapping[str, Any],
) -> tuple[dict[str, SparsityConfig], dict[str, SparsityConfig]]:
    """Return the configs of all qualities, and those without each one's own fields.

    A config has usual fields, those in common, and each one's own.
    """
    configs = {}
    bases = {}
    for name in dict.fromkeys([*QUALITIES, *differing]):
        own = differing.get(name)
        path = f"qualities.{name}"
        if name in FORMER_QUALITIES:
            raise ValueError(f"{path}: this quality is now {FORMER_QUALITIES[name]}")
        if name not in QUALITIES:
            raise ValueError(f"{path}: unknown quality; allowed: {', '.join(QUALITIES)}")
        if own is not None and not isinstance(own, Mapping):
            raise ValueError(f"{path}: expected a mapping as under sparsity, got {shown(own)}")
        usual = _merged(usually[name], common)
        configs[name] = build(SparsityConfig, _merged(usual, own or {}), path)
        bases[name] = build(SparsityConfig, usual)
    return configs, bases


def _merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Return groups of fields merged field by field, except `WHOLE`."""
    result = dict(first)
    for name, value in second.items():
        before = result.get(name)
        if name != WHOLE and isinstance(value, Mapping) and isinstance(before, Mapping):
            result[name] = {**before, **value}
        else:
            result[name] = value
    return result


def _read(path: Path) -> Any:  # noqa: ANN401 - what YAML has, which callers check
    """Return the values of a file; raise `ValueError` as `load_profile` does."""
    problem = "not valid YAML"
    reason = ""
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):  # it would wait for a writer
            raise OSError(0, "it is a pipe or device; give a file")
        data: Any = yaml.load(read_text(path, most=LARGEST_FILE_BYTES), _ProfileLoader)
        return {} if data is None else data
    except OSError as error:
        problem = "cannot read the profile"
        reason = str(error.strerror)
    except UnicodeError:
        problem = "cannot read the profile"
        reason = "it is no text in UTF-8"
    except RecursionError:
        reason = "nested too deeply"
    except yaml.MarkedYAMLError as error:
        reason = str(error.problem)
        if mark := error.problem_mark:
            reason += f", in line {mark.line + 1}, column {mark.column + 1}"
    except (yaml.YAMLError, ValueError) as error:  # dates and numbers that Python does not have
        reason = " ".join(str(error).split())
    raise ValueError(f"{path}: {problem} ({reason})")


def find_profile(
    model_folder: Path | str | None,
    transformer_class: str,
    *,
    experts: int = 1,
) -> Profile:
    """Return the profile of a model: its folder's own, else that of its transformer class.

    Args:
        model_folder: folder or hub name; None for the profile of the class.
        transformer_class: name of the diffusers class.
        experts: number of transformers in the pipeline. Classes may have a profile for two.

    Raises:
        ValueError: if there is neither, or the file is bad.
    """
    own = None if model_folder is None else Path(model_folder) / MODEL_PROFILE_NAME
    if own is not None and own.is_file():
        return load_profile(own)
    classes = profile_classes()
    if transformer_class not in classes:
        raise ValueError(
            f"no profile for the model class {transformer_class}; the command chipsparse models "
            f"lists the {len(classes)} classes that have one",
        )
    of_two = PROFILES / "two-experts" / f"{transformer_class}.yaml"
    of_class = PROFILES / f"{transformer_class}.yaml"
    return load_profile(of_two if experts > 1 and of_two.exists() else of_class)


def profile_classes() -> list[str]:
    """Return the transformer classes that chipsparse has a profile for."""
    return sorted(path.stem for path in PROFILES.glob("*.yaml"))


def medium_of(transformer_class: str) -> Medium:
    """Return what models of a class make, which is one of `profile_classes`."""
    medium: Medium = _read(PROFILES / f"{transformer_class}.yaml").get("medium", "video")
    return medium


def default_profile() -> Profile:
    """Return the profile of models that have none: the named qualities in general."""
    return load_profile(QUALITIES_FILE)


def bundled_model(name: str = BUNDLED_MODELS[0]) -> Path:
    """Return the folder of a bundled tiny model, in diffusers format.

    >>> DiffusionPipeline.from_pretrained(chipsparse.bundled_model("tiny-flux"))

    Args:
        name: ``"tiny-wan"`` makes videos of simple shapes (the default), ``"tiny-flux"`` images.

    Raises:
        ValueError: if there is no bundled model of that name, or this installation came without
            it.
    """
    if name not in BUNDLED_MODELS:
        raise UserError(
            f"{shown(name)} is no bundled model; these are {' and '.join(BUNDLED_MODELS)}",
        )
    folder = ASSETS / name
    if not folder.is_dir():
        raise UserError(
            f"this installation of chipsparse came without the bundled model {name}; name a folder "
            "or a hub model, or install chipsparse from its repository, which has it",
        )
    return folder
