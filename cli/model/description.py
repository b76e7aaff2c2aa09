"""A model of diffusers, in a folder or on the hub: what its own files say of it."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import diffusers
import torch

from chipsparse.cli.errors import UserError
from chipsparse.pipelines.call import GUIDANCE, guider_specs
from chipsparse.pipelines.denoising_loop import denoising_loops
from chipsparse.pipelines.model_files import (
    absent_components,
    check_complete,
    components_of,
    is_modular,
    read_index,
    read_json,
)

NO_DEFAULT = inspect.Parameter.empty
# In the names of pipelines that always start from an image.
FROM_IMAGES = ("Img2Img", "ImageToVideo", "ImageEdit", "Inpaint")


@dataclass(frozen=True)
class ModelDescription:
    """The facts of a model's own files, read before any weight is loaded."""

    location: str  # folder or hub name
    pipeline_class: type
    transformer_class: str
    transformer_config: dict[str, Any]  # with the class's defaults
    vae_config: dict[str, Any]  # likewise; empty without a VAE
    components: dict[str, list[str]] = field(default_factory=dict)  # library and class of each
    blocks: Any = None  # of a modular pipeline, which tell its inputs

    @property
    def has_guider(self) -> bool:
        """True where a guider of the pipeline makes a call of its own for each guidance branch."""
        return self.blocks is not None and bool(guider_specs(self.blocks))

    @property
    def experts(self) -> int:
        """The number of transformers, of which each computes some of the steps."""
        return len({"transformer", "transformer_2"} & set(self.components))

    def accepts(self, argument: str) -> bool:
        """Return whether the pipeline's call takes this argument."""
        return argument in self._inputs

    def default(self, argument: str) -> Any:
        """Return the pipeline's own default, or None."""
        default = self._inputs.get(argument)
        return None if default is NO_DEFAULT else default

    def needed_arguments(self) -> set[str]:
        """Return arguments without which the pipeline cannot be called, or fails when it is."""
        needed = {name for name, default in self._inputs.items() if default is NO_DEFAULT}
        # Their signatures have a default of None, which their code does not take.
        needed |= {name for name in ("mask_image", "control_image") if self.accepts(name)}
        if any(word in self.pipeline_class.__name__ for word in FROM_IMAGES):
            needed |= {"image"}
        return needed

    def lacks_text_encoder(self) -> bool:
        """Return whether the pipeline's class has text encoders and the model has none."""
        parameters = inspect.signature(self.pipeline_class).parameters
        encoders = {name for name in parameters if name.startswith("text_encoder")}
        return bool(encoders) and not encoders & set(self.components)

    def from_image(self) -> ModelDescription:
        """Return the same model as a pipeline that starts from an image; raise `UserError`."""
        if self.accepts("image"):
            return self
        from diffusers.pipelines import auto_pipeline

        others = auto_pipeline.AUTO_IMAGE2IMAGE_PIPELINES_MAPPING
        for name, pipeline_class in auto_pipeline.AUTO_TEXT2IMAGE_PIPELINES_MAPPING.items():
            if pipeline_class is self.pipeline_class and name in others:
                return dataclasses.replace(self, pipeline_class=others[name])
        raise UserError(
            f"{self.pipeline_class.__name__} takes no image; leave --image out, or use a model "
            "made for it",
        )

    @cached_property
    def _inputs(self) -> dict[str, Any]:
        """The arguments of the pipeline's call, each with its default or `NO_DEFAULT`."""
        if self.blocks is None:
            parameters = inspect.signature(self.pipeline_class.__call__).parameters.values()
            open_ended = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
            named = (item for item in parameters if item.kind not in open_ended)
            return {item.name: item.default for item in named if item.name != "self"}
        inputs = {item.name: item.default for item in self.blocks.inputs if item.name is not None}
        guiders = guider_specs(self.blocks)
        return {GUIDANCE: guiders[0].config.get(GUIDANCE), **inputs} if guiders else inputs


def describe_model(location: str) -> ModelDescription:
    """Return what the index and the configs say; raise `UserError` for what is wrong in them."""
    folder = Path(location).expanduser()
    if folder.exists():
        location = str(folder)
    index = read_index(location)
    modular = is_modular(index)
    base = "ModularPipeline" if modular else "DiffusionPipeline"
    pipeline_class = _class(index, "_class_name", base, location)
    blocks = None
    if modular:
        blocks = _class(index, "_blocks_class_name", "ModularPipelineBlocks", location)()
        runs_steps = bool(denoising_loops(blocks))
    else:
        runs_steps = "callback_on_step_end" in inspect.signature(pipeline_class.__call__).parameters
    if not runs_steps:
        raise UserError(f"{pipeline_class.__name__} has no denoising loop that can be watched")
    components = components_of(index)
    transformers = sorted(name for name in components if name.startswith("transformer"))
    if not transformers:
        raise UserError(
            f"the model {location} has no diffusion transformer ({pipeline_class.__name__} works "
            f"with {', '.join(components) or 'nothing'}); chipsparse needs one",
        )
    absent = absent_components(location, components)
    if not modular:  # whose components may be in other places
        check_complete(location, absent)
    read = [name for name in (transformers[0], "vae") if name in components]
    configs = {name: _component_config(location, name, components[name]) for name in read}
    return ModelDescription(
        location=location,
        pipeline_class=pipeline_class,
        transformer_class=index[transformers[0]][1],
        transformer_config=configs[transformers[0]],
        vae_config=configs.get("vae", {}),
        components={name: components[name][:2] for name in components if name not in absent},
        blocks=blocks,
    )


def _class(index: dict[str, Any], key: str, base: str, location: str) -> type:
    """Return the class of diffusers that the index names; raise `UserError` where it has none."""
    name = index.get(key)
    kind = getattr(diffusers, str(name), None)
    if not (isinstance(kind, type) and issubclass(kind, getattr(diffusers, base))):
        raise UserError(
            f"{key} of the model {location} is {name}, which is no {base} of diffusers "
            f"{diffusers.__version__}; the model was made for "
            f"{index.get('_diffusers_version', 'an unknown version')}",
        )
    return kind


def _component_config(location: str, name: str, entry: list[Any]) -> dict[str, Any]:
    """Return a component's ``config.json`` over its class's defaults; raise `UserError`."""
    library, class_name, *place = entry
    kind = getattr(diffusers, class_name, None)
    if library != "diffusers" or not isinstance(kind, type):
        raise UserError(
            f"the {name} of the model {location} has the class {library}.{class_name}, which "
            f"diffusers {diffusers.__version__} does not have",
        )
    folder = name
    if place and not (Path(location) / name).is_dir():  # of a modular pipeline, perhaps elsewhere
        location = place[0].get("pretrained_model_name_or_path") or location
        folder = place[0].get("subfolder") or name
    return default_arguments(kind) | read_json(location, f"{folder}/config.json")


def default_arguments(component_class: type) -> dict[str, Any]:
    """Return the config that a class of diffusers has where none of its arguments is given."""
    parameters = inspect.signature(component_class.__init__).parameters.values()  # type: ignore[misc]
    return {item.name: item.default for item in parameters if item.default is not NO_DEFAULT}


# Where to compute, and in what.


def choose_device(name: str) -> torch.device:
    """Return the device of `--device`; `auto` takes a CUDA GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(
            f"--device {name} needs a CUDA GPU that PyTorch can use, and there is none; "
            "use --device cpu",
        )
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        last = torch.cuda.device_count() - 1
        raise UserError(f"--device {name} does not exist; this machine has cuda:0 to cuda:{last}")
    return device


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype of `--dtype`; `auto` is bfloat16 on CUDA and float32 on a CPU."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype: torch.dtype = getattr(torch, name)
    return dtype


@contextmanager
def quiet_libraries(*, debug: bool) -> Iterator[None]:
    """Keep the libraries' progress bars and warnings off the screen, unless `debug`."""
    if debug:
        yield
        return
    import diffusers.utils.logging as diffusers_logging
    import huggingface_hub.utils.logging as hub_logging
    import transformers.utils.logging as transformers_logging

    hub_logging.set_verbosity_error()
    transformers_logging.set_verbosity_error()
    diffusers_logging.set_verbosity(logging.CRITICAL)  # modular pipelines log what they raise
    for library in (diffusers_logging, transformers_logging):
        library.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
