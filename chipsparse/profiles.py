"""Profiles: a sparsity config with the generation settings it was made for, as one YAML file.

A profile is found by the transformer's class in ``assets/profiles``, unless the model's folder
brings its own ``chipsparse.yaml``.
"""

from __future__ import annotations

import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from chipsparse.config import SparsityConfig
from chipsparse.tuned_range import TunedFor
from chipsparse.validation import Validated, build, option

ASSETS = Path(__file__).parent / "assets"
MODEL_PROFILE_NAME = "chipsparse.yaml"
LARGEST_FILE_BYTES = 1 << 20
MOST_MERGED_FIELDS = 1000


@dataclass(frozen=True)
class GenerationDefaults(Validated):
    """Settings of the pipeline call that the profile is meant for; null: the pipeline's own."""

    height: int | None = option(None, "height in pixels", minimum=1)
    width: int | None = option(None, "width in pixels", minimum=1)
    num_frames: int | None = option(None, "frames of the video", minimum=1)
    num_inference_steps: int | None = option(None, "denoising steps", minimum=1)
    guidance_scale: float | None = option(
        None,
        "classifier-free guidance, or the strength that a guidance-distilled model is told",
        minimum=0.0,
    )
    true_cfg_scale: float | None = option(
        None,
        "classifier-free guidance of pipelines that give guidance_scale another meaning (FLUX)",
        minimum=0.0,
    )
    max_sequence_length: int | None = option(None, "text tokens, padding included", minimum=1)


@dataclass(frozen=True)
class _ProfileFile(Validated):
    model_class: str = option("", "class of the transformer, such as WanTransformer3DModel")
    description: str = option("", "what the profile is for and what was measured")
    generation: GenerationDefaults = option(GenerationDefaults(), "settings of the pipeline call")
    sparsity: SparsityConfig = option(SparsityConfig(), "what is computed")
    tuned: TunedFor | None = option(None, "what it was tuned for and measured with")


@dataclass(frozen=True)
class Profile:
    """A loaded profile.

    Attributes:
        model_class: the transformer class that it is for.
        description: one sentence for people.
        generation: settings of the pipeline call.
        sparsity: what is computed.
        source: the file it came from.
        tuned: what it was tuned for; None where people wrote it.
    """

    model_class: str
    description: str
    generation: GenerationDefaults
    sparsity: SparsityConfig
    source: str
    tuned: TunedFor | None = None

    def __repr__(self) -> str:
        return f"<Profile for {self.model_class or 'any model'} from {self.source}>"

    def serves(self, transformer_class: str) -> bool:
        """Whether it is for models of this class; one that names no class is for all."""
        return self.model_class in ("", transformer_class)


class _ProfileLoader(yaml.SafeLoader):
    """YAML in which no field stands twice, nor fields by the million."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        names = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in names:
                    raise yaml.MarkedYAMLError(
                        problem=f"{key.value} stands twice", problem_mark=key.start_mark
                    )
                names.add(key.value)
        return node

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        super().flatten_mapping(node)
        if len(node.value) > MOST_MERGED_FIELDS:  # merged mappings of merged mappings, and so on
            raise yaml.MarkedYAMLError(
                problem=f"more than {MOST_MERGED_FIELDS} fields", problem_mark=node.start_mark
            )


def _yaml_problem(error: yaml.YAMLError | ValueError) -> str:
    """What is wrong, and where if the parser tells."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem and error.problem_mark:
        mark = error.problem_mark
        return f"{error.problem}, in line {mark.line + 1}, column {mark.column + 1}"
    return " ".join(str(error).split())


def load_profile(path: Path | str) -> Profile:
    """Reads a profile.

    Raises:
        ValueError: if the file is missing, is no regular file, is not YAML, names a field twice, or
            has an unknown or ill-typed field; the message names the file, the field's path and what
            is allowed.
    """
    try:
        data: Any = yaml.load(_profile_text(Path(path)), _ProfileLoader)
    except OSError as error:
        raise ValueError(f"{path}: cannot read the profile ({error.strerror})") from None
    except RecursionError:
        raise ValueError(f"{path}: not valid YAML (nested too deeply)") from None
    except (yaml.YAMLError, ValueError) as error:  # of dates and numbers that Python does not have
        raise ValueError(f"{path}: not valid YAML ({_yaml_problem(error)})") from None
    try:
        parsed = build(_ProfileFile, {} if data is None else data)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return Profile(
        parsed.model_class,
        parsed.description,
        parsed.generation,
        parsed.sparsity,
        str(path),
        parsed.tuned,
    )


def _profile_text(path: Path) -> str:
    """The text of a file, looked at before it is opened: a pipe would wait for its writer."""
    found = path.stat()
    if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
        raise OSError(0, "it is no regular file")
    if found.st_size > LARGEST_FILE_BYTES:
        raise OSError(0, f"its {found.st_size:,} bytes are too many for a profile")
    return path.read_text(encoding="utf-8")


def find_profile(model_folder: Path | str | None, transformer_class: str) -> Profile:
    """The profile of a model: its folder's own, else that of its transformer class.

    Raises:
        ValueError: if there is neither, or the file is bad.
    """
    own = None if model_folder is None else Path(model_folder) / MODEL_PROFILE_NAME
    if own is not None and own.is_file():
        return load_profile(own)
    by_class = {path.stem: path for path in sorted((ASSETS / "profiles").glob("*.yaml"))}
    if transformer_class not in by_class:
        raise ValueError(
            f"no profile for the model class {transformer_class}; "
            f"known classes: {', '.join(by_class)}"
        )
    return load_profile(by_class[transformer_class])


def bundled_model() -> Path:
    """The folder of the bundled tiny video model."""
    return ASSETS / "tiny-wan"
