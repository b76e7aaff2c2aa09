"""Finding, checking and loading a diffusers model folder or hub model."""

from __future__ import annotations

import dataclasses
import inspect
import json
import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import diffusers
import torch

from chipsparse.cli.errors import UserError, first_line, user_errors
from chipsparse.cli.options import could_be_hub_name, is_here

LAYERS = re.compile(r"num_(\w+_)?layers")
MOST_LAYERS = 1000  # to make many more would take for ever
# In the names of pipelines that always start from an image.
FROM_IMAGES = ("Img2Img", "ImageToVideo", "ImageEdit", "Inpaint")


@dataclass(frozen=True)
class ModelDescription:
    """What a model's own files say, read before any weight is loaded.

    Attributes:
        location: the folder or hub name.
        transformer_config: the transformer's config, with the class's defaults.
        vae_config: the VAE's config, with the class's defaults; empty without a VAE.
        components: library and class of every component.
    """

    location: str
    pipeline_class: type
    transformer_class: str
    transformer_config: dict[str, Any]
    vae_config: dict[str, Any]
    components: dict[str, list[str]] = field(default_factory=dict)

    @property
    def has_guider(self) -> bool:
        """Whether a guider of the pipeline makes a call of its own for each guidance branch."""
        return False

    def accepts(self, argument: str) -> bool:
        """Whether the pipeline's call takes this argument."""
        return argument in self._call_parameters

    def default(self, argument: str) -> Any:
        """The pipeline's own default, or None."""
        parameter = self._call_parameters.get(argument)
        if parameter is None or parameter.default is inspect.Parameter.empty:
            return None
        return parameter.default

    def needed_arguments(self) -> set[str]:
        """Arguments without which the pipeline cannot be called, or fails when it is."""
        needed = {
            name
            for name, parameter in self._call_parameters.items()
            if name != "self"
            and parameter.default is inspect.Parameter.empty
            and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        }
        # Their signatures have a default of None, which their code does not take.
        needed |= {name for name in ("mask_image", "control_image") if self.accepts(name)}
        if any(word in self.pipeline_class.__name__ for word in FROM_IMAGES):
            needed |= {"image"}
        return needed

    def lacks_text_encoder(self) -> bool:
        """Whether the pipeline reads prompts with text encoders and the model has none of them."""
        wanted = [
            name
            for name in inspect.signature(self.pipeline_class).parameters
            if name.startswith("text_encoder")
        ]
        return bool(wanted) and not any(name in self.components for name in wanted)

    def from_image(self) -> ModelDescription:
        """The same model as a pipeline that starts from an image; raises `UserError`."""
        if self.accepts("image"):
            return self
        from diffusers.pipelines import auto_pipeline

        others = auto_pipeline.AUTO_IMAGE2IMAGE_PIPELINES_MAPPING
        for name, pipeline_class in auto_pipeline.AUTO_TEXT2IMAGE_PIPELINES_MAPPING.items():
            if pipeline_class is self.pipeline_class and name in others:
                return dataclasses.replace(self, pipeline_class=others[name])
        raise UserError(
            f"{self.pipeline_class.__name__} takes no image; leave --image out, or use a model "
            "made for it"
        )

    @property
    def _call_parameters(self) -> dict[str, inspect.Parameter]:
        return dict(inspect.signature(self.pipeline_class.__call__).parameters)


def is_local(location: str) -> bool:
    """Whether the model is a folder here, or was meant to be one, rather than a hub name."""
    return is_here(location) or not could_be_hub_name(location)


def describe_model(location: str) -> ModelDescription:
    """Reads and checks `model_index.json` and the configs; raises `UserError` for what is wrong."""
    folder = Path(location).expanduser()
    if folder.exists():
        location = str(folder)
    elif is_local(location):
        raise UserError(f"the model folder {location} does not exist")
    index = _index(location)
    if "_blocks_class_name" in index:
        from chipsparse.cli.model.modular import describe_modular  # which needs this module

        return describe_modular(location, index)
    components = {
        name: entry
        for name, entry in index.items()
        if isinstance(entry, list) and len(entry) == 2 and entry[0] is not None
    }
    pipeline_class = _pipeline_class(index, location)
    if folder.exists():
        for name in components:
            if not (folder / name).is_dir():
                raise UserError(
                    f"the model {location} is incomplete: model_index.json names {name}, but "
                    f"there is no folder {folder / name}"
                )
    name = "transformer" if "transformer" in components else "transformer_2"
    if name not in components:
        raise UserError(
            f"the model {location} has no diffusion transformer ({pipeline_class.__name__} works "
            f"with {', '.join(components) or 'nothing'}); chipsparse needs one"
        )
    return ModelDescription(
        location=location,
        pipeline_class=pipeline_class,
        transformer_class=components[name][1],
        transformer_config=component_config(location, name, components[name]),
        vae_config=component_config(location, "vae", components.get("vae")),
        components=components,
    )


def _index(location: str) -> dict[str, Any]:
    """Return what a model's index says: ``model_index.json``, or that of a modular pipeline."""
    modular = "modular_model_index.json"
    try:
        return read_json(location, "model_index.json")
    except UserError as error:
        from huggingface_hub import errors

        if not (Path(location) / modular).exists() and not isinstance(
            error.__cause__, errors.EntryNotFoundError
        ):
            raise
        return read_json(location, modular)


def load_pipeline(
    model: ModelDescription,
    *,
    device: torch.device,
    dtype: torch.dtype,
    scheduler: Any | None = None,
) -> Any:
    """Return the pipeline on the device; its own progress bars stay off.

    Args:
        scheduler: that replaces the model's own; None: it stays.
    """
    # Which need this module.
    from chipsparse.cli.model.modular import ModularDescription, load_modular
    from chipsparse.cli.model.weights import check_weight_files

    pipeline_class: Any = model.pipeline_class
    here = is_here(model.location)
    with user_errors(Exception, what=f"the model {model.location} could not be loaded"):
        if isinstance(model, ModularDescription):
            if here:
                check_weight_files(model, Path(model.location))
            pipe = load_modular(model, dtype)
        else:
            folder = model.location if here else pipeline_class.download(model.location)
            check_weight_files(model, Path(folder))
            pipe = pipeline_class.from_pretrained(model.location, dtype=dtype)
            pipe.set_progress_bar_config(disable=True)
    if scheduler is not None:
        pipe.scheduler = scheduler
    return pipe.to(device)


def choose_device(name: str) -> torch.device:
    """The device of `--device`; `auto` takes a CUDA GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(
            f"--device {name} needs a CUDA GPU that PyTorch can use, and there is none; "
            "use --device cpu"
        )
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise UserError(
            f"--device {name} does not exist; this machine has cuda:0 to cuda:{count - 1}"
        )
    return device


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of `--dtype`; `auto` is bfloat16 on CUDA and float32 on a CPU."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype: torch.dtype = getattr(torch, name)
    return dtype


@contextmanager
def quiet_libraries(*, debug: bool) -> Iterator[None]:
    """Keeps the libraries' progress bars and warnings off the screen, unless `debug`."""
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


def read_json(location: str, name: str) -> dict[str, Any]:
    """Return the content of one of a model's files; raise `UserError` for what is wrong with it."""
    file = Path(location) / name
    if not Path(location).exists():
        file = _fetch(location, name)
    elif not file.is_file():
        raise UserError(f"{location} is not a diffusers model folder: it has no {name}")
    with user_errors(OSError, ValueError, what=f"{file} is not valid JSON"):
        content = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise UserError(f"{file} must hold a JSON object, not a {type(content).__name__}")
    return content


def _fetch(hub_name: str, name: str) -> Path:
    from huggingface_hub import errors, hf_hub_download

    reasons = {
        errors.LocalEntryNotFoundError: "no connection to it, and no copy in the cache",
        errors.GatedRepoError: "the model asks for consent to its terms: accept them there, and "
        "log in",
        errors.RepositoryNotFoundError: "it has no such model, or a private one",
        errors.EntryNotFoundError: f"the model has no {name}",
    }
    try:
        return Path(hf_hub_download(hub_name, name))
    except Exception as error:
        known = (reason for kind, reason in reasons.items() if isinstance(error, kind))
        raise UserError(
            f"{hub_name} is neither a folder here nor a model that could be fetched from the "
            f"Hugging Face hub: {next(known, first_line(error))}"
        ) from error


def _pipeline_class(index: dict[str, Any], location: str) -> type:
    name = index.get("_class_name")
    if not isinstance(name, str):
        raise UserError(f"model_index.json of {location} does not name a pipeline (_class_name)")
    found = getattr(diffusers, name, None)
    if not (isinstance(found, type) and issubclass(found, diffusers.DiffusionPipeline)):
        raise UserError(
            f"the model {location} needs the pipeline class {name}, which diffusers "
            f"{diffusers.__version__} does not have; update diffusers or correct model_index.json"
        )
    if "callback_on_step_end" not in inspect.signature(found.__call__).parameters:
        raise UserError(f"the pipeline class {name} cannot report its steps; it is not supported")
    return found


def component_config(location: str, name: str, entry: list[str] | None) -> dict[str, Any]:
    """Return a component's `config.json` over its class's defaults; empty without an entry."""
    if entry is None:
        return {}
    library, class_name = entry
    found = getattr(diffusers, class_name, None)
    if library != "diffusers" or not isinstance(found, type):
        raise UserError(
            f"the {name} of the model {location} has the class {library}.{class_name}, which "
            f"diffusers {diffusers.__version__} does not have"
        )
    config = default_arguments(found) | read_json(location, f"{name}/config.json")
    for key, value in config.items():
        counts = LAYERS.fullmatch(key) and isinstance(value, int | float | str)
        if counts and value not in range(MOST_LAYERS + 1):
            raise UserError(
                f"{name}/config.json of {location}: {key} must be a whole number from 0 to "
                f"{MOST_LAYERS}, got {value!r}"
            )
    return config


def default_arguments(component_class: type) -> dict[str, Any]:
    """The config that a class of diffusers has where none of its arguments is given."""
    parameters = inspect.signature(component_class.__init__).parameters.values()  # type: ignore[misc]
    return {
        parameter.name: parameter.default
        for parameter in parameters
        if parameter.default is not inspect.Parameter.empty
    }
