"""Options of the commands: each is declared once, as a field of a dataclass.

`option` gives a field its help. The type of the field is its check, by pydantic. `as_command` makes
the function that typer reads. A field without `option` is no option: so a command leaves out what
it inherits. Nothing here needs torch.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import os
import re
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

import typer
from annotated_types import Interval
from pydantic import AfterValidator, ConfigDict, TypeAdapter, ValidationError

from chipsparse.cli.errors import UserError, plain_words, reported_errors, user_errors
from chipsparse.cli.media.formats import (
    CLIPS,
    DEFAULT_FPS,
    SUFFIXES,
    check_file,
    check_kind,
    check_output,
)
from chipsparse.cli.prompts import read_prompts, typed_prompt
from chipsparse.cli.ranks import this_rank
from chipsparse.common.bounded import Seed
from chipsparse.common.byte_sizes import parse_bytes
from chipsparse.common.files import IMAGES, Write, beside, check_inputs_stay, clip_writes, numbered
from chipsparse.experiments.samples import Sample
from chipsparse.pipelines.model_files import HUB_NAME, read_folder
from chipsparse.pipelines.model_sizes import check_sizes
from chipsparse.profiles.profile import (
    ASSETS,
    BUNDLED_MODELS,
    MODEL_PROFILE_NAME,
    MOST_STEPS,
    PROFILES,
    QUALITIES_FILE,
    GenerationDefaults,
    Profile,
    bundled_model,
    check_quality,
    load_profile,
)

if TYPE_CHECKING:
    from PIL.Image import Image

    from chipsparse.cli.model.lora import Lora

REQUIRED: Any = dataclasses.MISSING
FROM_PROFILE = "from the profile"
BESIDE = ("dense", "compare")  # words in the names of the files that ``--compare`` adds
# What shows or hides something and changes no result.
SHOWING = frozenset({"json", "debug", "verbose"})
# What ``--from`` takes of a record: all that decides about a clip, and nothing of the machine.
REPEATED = (
    "prompt", "model", "lora", "scheduler", "dtype", "seed", "image", "strength", "height", "width",
    "frames", "steps", "guidance_scale", "flow_shift", "negative_prompt", "config", "quality",
    "dense", "fps", "crf",
)  # fmt: skip
OUTPUT_MISSING = "missing option '--output' / '-o'; chipsparse generate --help tells more"


@dataclass(frozen=True)
class _Declared:
    make: Callable[..., Any]
    names: tuple[str, ...]
    words: dict[str, Any]


def option(
    *also: str,
    help: str,
    panel: str | None = None,
    default: object = None,
    shown: str | bool = True,
    metavar: str | None = None,
    make: Callable[..., Any] = typer.Option,
) -> Any:  # noqa: ANN401 - in place of a value of the field's type
    """Return a field that is an option, called as the field is with dashes for underscores.

    ``also`` are further names, such as ``-o``, and ``panel`` is the part of the help that has it.
    ``shown`` is the default in words; True shows the value, False nothing.
    """
    words = {"help": help, "rich_help_panel": panel, "show_default": shown, "metavar": metavar}
    return dataclasses.field(default=default, metadata={"declared": _Declared(make, also, words)})


argument = partial(option, make=typer.Argument, shown=False)
# Those of the parts of the help that several commands have.
model_option = partial(option, panel="Model")
generation_option = partial(option, panel="Generation")
sparsity_option = partial(option, panel="Sparsity")
output_option = partial(option, panel="Output")


def seed_option() -> int:
    """Return the field of ``--seed``."""
    seed: int = generation_option(
        help="Seed of the noise; the same one gives the same result.",
        default=0,
    )
    return seed


# Types of values, with their checks: these return the value, or raise `ValueError` with the words
# that follow the option and its value in the error, or `UserError` with a whole sentence.


def _check_model(location: str) -> str:
    if not location.strip():
        raise UserError("--model is empty; leave it out for the bundled tiny model")
    if location in BUNDLED_MODELS and not is_here(location):
        return str(bundled_model(location))
    owner_of_hub = HUB_NAME.fullmatch(location)
    if not is_here(location) and (owner_of_hub is None or Path(owner_of_hub[1]).is_dir()):
        raise UserError(
            f"the model folder {location} does not exist; a hub name has the form owner/name, "
            f"where owner is no folder here; bundled models are {' and '.join(BUNDLED_MODELS)}",
        )
    return location


def _check_device(name: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,2})?", name):
        raise ValueError("is no device for this; use auto, cpu, cuda or cuda:N")
    return name


def _check_memory(text: str) -> str:
    try:
        parse_bytes(text)
    except ValueError:
        raise ValueError("is no amount of memory such as 24G or 512M") from None
    return text


def _check_profile(path: Path) -> Path:
    with user_errors(ValueError):
        load_profile(path)
    return path


def _check_quality(name: str) -> str:
    with user_errors(ValueError, what="--quality"):
        check_quality(name)
    return name


Positive = Annotated[int, Interval(ge=1)]
# Beyond the largest rate timestamps fall together.
Fps = Annotated[float, Interval(ge=1, le=1000)]
Prompt = Annotated[str, AfterValidator(typed_prompt)]
Model = Annotated[str, AfterValidator(_check_model)]
Device = Annotated[str, AfterValidator(_check_device)]
Memory = Annotated[str, AfterValidator(_check_memory)]
ProfileFile = Annotated[Path, AfterValidator(_check_profile)]
Quality = Annotated[str, AfterValidator(_check_quality)]


def is_here(location: str) -> bool:
    """Return whether a model's folder is on this machine."""
    return os.path.exists(Path(location).expanduser())


def model_files(location: str) -> list[Path]:
    """Return the files and folders that are read of a model; none for one on the hub."""
    folder = Path(location).expanduser()
    components = {config.parent for config in folder.glob("*/*config.json")}
    return [*folder.glob("*model_index.json"), folder / MODEL_PROFILE_NAME, *components]


def check_serves(profile: Profile, transformer_class: str, location: str) -> None:
    """Raise `UserError` where a profile is for another class than the model has."""
    if not profile.serves(transformer_class):
        raise UserError(
            f"{profile.source} is for {profile.model_class}, but the model {location} has a "
            f"{transformer_class}",
        )


# The options of commands.

AnyOptions = TypeVar("AnyOptions", bound="PrintOptions")


@dataclass(frozen=True, kw_only=True)
class PrintOptions:
    """The options of every command; a subclass adds its own, and leads in the help."""

    json: bool = output_option(help="Print one JSON object instead.", default=False)
    debug: bool = output_option(
        help="Show the traceback of an error, and the libraries' own messages.",
        default=False,
    )

    def check(self) -> None:
        """Raise `UserError` for options that do not go together, with any model and device."""

    def check_contents(self) -> None:
        """Raise `UserError` for what is in the files that are read, as far as torch is not needed.

        By then no file that is written would replace one of them.
        """

    @classmethod
    def completed(cls, values: dict[str, Any], typed: Set[str]) -> dict[str, Any]:
        """Return all values with those of a file that stands for several options; none here.

        Args:
            values: What was typed, and defaults, by field.
            typed: The fields that were typed, also those that were typed as the default is.

        Raises:
            UserError: The file cannot be read, or what it says cannot be done.
        """
        return values

    def given(self) -> list[str]:
        """Return the options and arguments that are not as if they were left out."""
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        return [
            item.words["metavar"] if item.make is typer.Argument else option_name(name)
            for name, item in _declared(type(self)).items()
            if getattr(self, name) != defaults[name]
        ]

    def refuse(self, *names: str, why: str) -> None:
        """Raise `UserError` where an option is given that would be without effect."""
        for name in self.given():
            if name in names:
                raise UserError(f"{name} {why}")

    def reads(self) -> list[Path]:
        """Return all files and folders that are read, as far as the options tell."""
        return []

    def writes(self) -> list[Write]:
        """Return all files that may be written."""
        return []

    def kept(self) -> str:
        """Return what an interruption leaves, in words."""
        return "nothing was written"


def seeds_from(first: int, number: int) -> range:
    """So many seeds; `UserError` where PyTorch's generator does not take them."""
    if first + number > 2**64:
        raise UserError(f"--seed {first}: {number} seeds from there go beyond 2^64 - 1")
    return range(first, first + number)


@dataclass(frozen=True, kw_only=True)
class GenerationOptions(PrintOptions):
    """The options of every command about a generation; None where one was left out."""

    model: Model | None = model_option(
        help="Model folder in diffusers format, a Hugging Face hub name, or a bundled tiny model: "
        "tiny-wan (videos) or tiny-flux (images).",
        shown="tiny-wan",
    )
    lora: list[str] | None = None
    scheduler: str | None = None
    device: Device = model_option(
        help="cpu, cuda, cuda:N, or auto: a GPU if there is one.",
        default="auto",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = model_option(
        help="float32, bfloat16, float16, or auto: bfloat16 on a GPU, float32 on a CPU.",
        default="auto",
    )
    gpus: Positive | None = model_option(
        help="GPUs of this machine that make it together; with --device cpu so many processes.",
        shown="1, or as many as torchrun started",
    )
    guidance_parallel: Annotated[int, Interval(ge=1, le=2)] | None = model_option(
        help="How many of those GPUs compute guidance branches of their own: 2, where the model's "
        "guidance is two calls per step.",
        shown="1",
    )
    image: Path | None = None
    strength: float | None = None
    height: Positive | None = generation_option(help="Height in pixels.", shown=FROM_PROFILE)
    width: Positive | None = generation_option(help="Width in pixels.", shown=FROM_PROFILE)
    frames: Positive | None = generation_option(
        help="Number of frames; models of images have none.",
        shown=FROM_PROFILE,
    )
    steps: Annotated[int, Interval(ge=1, le=MOST_STEPS)] | None = generation_option(
        help="Number of denoising steps.",
        shown=FROM_PROFILE,
    )
    guidance_scale: Annotated[float, Interval(ge=0, le=1000)] | None = generation_option(
        help="How closely to follow the prompt; 1 turns guidance off.",
        shown=FROM_PROFILE,
    )
    flow_shift: Annotated[float, Interval(gt=0, le=1000)] | None = generation_option(
        help="Shift of the noise levels towards the noisy end, of schedulers of flow matching; "
        "larger sizes want more.",
        shown="the scheduler's own",
    )
    negative_prompt: Prompt | None = generation_option(help="What not to show.", shown="none")
    config: ProfileFile | None = sparsity_option(
        help="Profile (YAML) that says what is computed when.",
        shown="the model's own",
    )
    quality: Quality | None = sparsity_option(
        help="Quality of the profile: faithful (closest to dense), balanced, fast, draft "
        "(fastest), or chipmunk (the schedule published first, to compare with).",
        shown="balanced",
    )
    vram: Memory | None = sparsity_option(
        help="GPU memory for all, weights included, such as 24G.",
        shown="what is free",
    )
    ram: Memory | None = sparsity_option(
        help="Host memory for caches, such as 64G.",
        shown="most of what is free",
    )
    dense: bool = False
    strict: bool = False

    def reads(self) -> list[Path]:
        """Return the model's files, the bundled assets, the config, the image and the LoRAs."""
        bundled = [PROFILES, QUALITIES_FILE, ASSETS / "prompts"]
        named = [file for file in (self.config, self.image) if file is not None]
        loras = [lora.file for lora in self.loras]
        model = self.model or str(ASSETS / BUNDLED_MODELS[0])
        return [*model_files(model), *bundled, *named, *loras]

    def check_model_files(self) -> None:
        """Raise `UserError` for what does not go together with the files of the model.

        Nothing here needs torch, which takes seconds: what a class of diffusers decides, and a
        model on the hub, are checked later.
        """
        if self.device == "cpu":
            self.check_budgets(on_gpu=False)
        folder = read_folder(self.model)
        if folder is None:
            return
        if folder.tells_sizes:
            # A model of images has no frames, whatever its VAE could do.
            frames = self.frames if folder.medium == "video" else None
            check_sizes(GenerationDefaults(self.height, self.width, frames), folder)
        if self.config is not None:
            with user_errors(ValueError):
                check_serves(load_profile(self.config), folder.transformer_class, folder.location)

    def check_budgets(self, *, on_gpu: bool) -> None:
        """Raise `UserError` for a memory budget that has no effect on the device."""
        if self.vram is not None and not on_gpu:
            raise UserError(f"--vram {self.vram} has no effect on a CPU; use --ram")

    def memory_budgets(self) -> dict[str, int]:
        """Return what ``--vram`` and ``--ram`` change in a `SparsityConfig`."""
        budgets = {"memory.vram": self.vram, "memory.ram": self.ram}
        return {name: parse_bytes(text) for name, text in budgets.items() if text is not None}

    def input_image(self) -> Image | None:
        """Return the image of ``--image``, in its own size; raise `UserError`. It is read once."""
        return self._image

    @cached_property
    def _image(self) -> Image | None:
        from chipsparse.cli.media.read import read_image

        return None if self.image is None else read_image(self.image)

    @cached_property
    def loras(self) -> list[Lora]:
        """The adapters of ``--lora``; raises `UserError`."""
        from chipsparse.cli.model.lora import read_lora

        return [read_lora(text) for text in self.lora or ()]


@dataclass(frozen=True)
class Item(Sample):
    """One clip of a command; sparse, dense or both. Its label is empty where it is the only one."""

    output: Path = dataclasses.field(kw_only=True)  # of a series, with the item's number
    report: Path | None = None  # likewise; None without --report

    @property
    def name(self) -> str:
        """The clip's file, which names it in a series."""
        return str(self.output)


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(GenerationOptions):
    """The options of `generate`; None where one was left out."""

    prompt: Prompt | None = argument(help="What to show, in words; or give --prompts.")
    output: Path = output_option(  # `completed` sees to it that there is one
        "-o",
        help="File to write: .mp4, .webm, .gif, or .png (numbered files for several frames). "
        "Models of images write .png, .jpg or .webp.",
        shown="with --from, NAME-2 in its folder",
    )
    from_: Path | None = generation_option(
        help="Repeat the generation of a record (--report, --json or a batch's manifest), or of a "
        "file beside its record. Options that are given replace what the record says.",
        shown="none",
        metavar="RECORD",
    )
    lora: list[str] | None = model_option(
        help="LoRA to load: a .safetensors file, a folder with one or a hub name; may be given "
        "several times.",
        shown="none",
        metavar="PATH[:SCALE]",
    )
    scheduler: str | None = model_option(
        help="Another scheduler of diffusers, such as UniPC or DPMSolverMultistep, with the "
        "model's config.",
        shown="the model's own",
    )
    prompts: Path | None = generation_option(
        help="File of prompts, a line each, or bundled ones: shapes, images or suite. Empty lines "
        "and those with # in front are left out. NAME-000, NAME-001, ... are written, in order.",
        shown="none",
    )
    num: Annotated[int, Interval(ge=1, le=100_000)] | None = generation_option(
        help="Seeds for each prompt, from --seed on: all of the first prompt, then those of the "
        "next one.",
        shown="1",
    )
    seed: Seed = seed_option()
    image: Path | None = generation_option(
        help="Image to start from, where the model takes one; it is scaled and cut to the "
        "size that is made, which has its shape unless --height and --width say otherwise.",
        shown="none",
    )
    strength: Annotated[float, Interval(gt=0, le=1)] | None = generation_option(
        help="How far to go from the image of --image: 1 is all the way.",
        shown="the pipeline's own",
    )
    dense: bool = sparsity_option(help="Run the unpatched model.", default=False)
    compare: bool = sparsity_option(
        help="Also run the unpatched model with the same seed; report speed-up, PSNR and SSIM, "
        "and write NAME-dense and, side by side, NAME-compare beside the output.",
        default=False,
    )
    strict: bool = sparsity_option(
        help="Fail, before anything is written, where anything would run dense although the "
        "profile wants it sparse.",
        default=False,
    )
    report: Path | None = output_option(
        help="JSON file for all that each step and layer of the sparse run did, with its time; "
        "written also where the run fails.",
        shown="none",
    )
    fps: Fps = output_option(help="Frames per second of a video.", default=DEFAULT_FPS)
    crf: int | None = output_option(
        help="Constant rate factor of the encoder of a video, 0 to 51 for .mp4 and to 63 for "
        ".webm: less is better and larger.",
        shown="visually lossless",
    )
    verbose: bool = output_option(
        "-v",
        help="Also tell which kernels ran, and why others did not.",
        default=False,
    )

    @classmethod
    def completed(cls, values: dict[str, Any], typed: Set[str]) -> dict[str, Any]:
        """Return the values with those of ``--from``; `UserError` without any ``--output``."""
        if values.get("from_") is not None:
            return _repeated(cls, values, typed)
        if values["output"] is None:
            raise UserError(OUTPUT_MISSING)
        return values

    @property
    def mode(self) -> Literal["dense", "sparse", "compare"]:
        """What is made: "compare" is both."""
        return "dense" if self.dense else "compare" if self.compare else "sparse"

    @property
    def ways(self) -> tuple[Literal["dense", "sparse"], ...]:
        """The generations of each clip, in their order; the last one is the result."""
        return ("dense", "sparse") if self.compare else ("dense",) if self.dense else ("sparse",)

    @property
    def many(self) -> bool:
        """True for ``--prompts`` and ``--num``, even if that is one clip."""
        return self.prompts is not None or self.num is not None

    @cached_property
    def items(self) -> list[Item]:
        """The clips: all prompts by all seeds, with numbered files if there are many.

        Raises `UserError` without a prompt, or for two sources of prompts.
        """
        if (self.prompt is None) == (self.prompts is None):
            both = "not both" if self.prompt is not None else "got neither"
            raise UserError(f"give a prompt, or a file of them with --prompts; {both}")
        texts = [self.prompt or ""] if self.prompts is None else read_prompts(self.prompts)
        seeds = seeds_from(self.seed, self.num or 1)
        count = len(texts) * len(seeds)
        if not self.many:
            return [Item(0, texts[0], self.seed, "", output=self.output, report=self.report)]
        return [
            Item(
                number,
                text,
                seed,
                f"{number + 1} of {count}",
                output=numbered(self.output, number, count),
                report=None if self.report is None else numbered(self.report, number, count),
            )
            for number, (text, seed) in enumerate(itertools.product(texts, seeds))
        ]

    def check(self) -> None:
        """Raise `UserError` for options without effect, and for files of other kinds."""
        if self.dense and self.compare:
            raise UserError(
                "--dense and --compare exclude each other: --compare makes the dense video too",
            )
        if self.dense:
            sparse = ("--quality", "--strict", "--report", "--vram", "--ram")
            self.refuse(*sparse, why="is about the sparse run, which --dense leaves out")
        if self.dense and (self.gpus or 1) > 1:
            raise UserError("several GPUs share the sparse run, which --dense leaves out")
        if self.image is None:
            self.refuse("--strength", why="needs an --image")
        also = BESIDE if self.compare else ()
        fps = None if self.fps == DEFAULT_FPS else self.fps
        folder = read_folder(self.model)
        medium = None if folder is None else folder.medium
        offered = {"image": IMAGES, "video": CLIPS, None: SUFFIXES}[medium]
        for item in self.items:
            known = item.output.suffix.lower() in SUFFIXES
            if known and medium is not None:
                check_kind(item.output, video=medium == "video")
            suffixes = SUFFIXES if known else offered
            check_output(item.output, fps=fps, crf=self.crf, also=also, suffixes=suffixes)
            if item.report is not None:
                check_file("--report", item.report, ".json")
        self.input_image()
        this_rank(self.gpus, self.guidance_parallel)

    def check_contents(self) -> None:
        """Raise `UserError` where the model's files cannot be read."""
        self.check_model_files()

    def reads(self) -> list[Path]:
        """Return also the file of prompts, and that of ``--from``."""
        named = [file for file in (self.prompts, self.from_) if file is not None]
        return [*super().reads(), *named]

    def writes(self, *, single: bool = True) -> list[Write]:
        """Return all files that may be written; ``single``: each clip is one image, or no PNG."""
        writes: list[Write] = []
        for item in self.items:
            clips = [item.output]
            if self.compare:
                clips += [beside(item.output, word) for word in BESIDE]
            for clip in clips:
                writes += clip_writes("--output", clip, single=single)
            if item.report is not None:
                writes.append(Write("--report", item.report))
        return writes


# From the declarations to typer, and from what was typed to the options.


def as_command(run: Callable[[AnyOptions], None]) -> Callable[..., None]:
    """Return the function that typer makes a command of: ``run`` gets the checked options."""
    kind = get_type_hints(run)["options"]

    @functools.wraps(run)
    def command(context: typer.Context, **values: Any) -> None:
        debug = bool(values.get("debug"))
        # Only the parser knows whether a value that equals the default was typed.
        typed = {name for name in values if _source(context, name) != "DEFAULT"}
        with reported_errors(debug=debug):
            options = read_options(kind, kind.completed(values, typed))
            check_inputs_stay(options.writes(), options.reads())
            options.check_contents()
        with reported_errors(debug=debug, kept=options.kept):
            run(options)

    context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    parameters = [context, *_parameters(kind)]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return command


def _source(context: typer.Context, name: str) -> str:
    """Return where the parser took a value from, such as ``COMMANDLINE`` or ``DEFAULT``."""
    source = context.get_parameter_source(name)
    return "DEFAULT" if source is None else source.name


def _repeated(
    kind: type[GenerateOptions],
    values: dict[str, Any],
    typed: Set[str],
) -> dict[str, Any]:
    """Return the values with those of the record of ``--from`` where nothing was typed."""
    from chipsparse.cli.generate.repeat import find_record, new_name

    record = find_record(read_value(kind, "from_", values["from_"]))
    recorded = words_values(kind, record.command)
    if record.guidance is not None:
        recorded["guidance_scale"] = record.guidance
    before = Path(recorded.get("output", ""))
    if not before.name:
        recorded.pop("output", None)
    needed = [] if "prompts" in typed else ["prompt"]
    needed.append("seed")
    if "output" not in typed:
        needed.append("output")
    record.check_complete([name for name in needed if name not in {*recorded, *typed}])
    output = values["output"] or new_name(record.source.with_name(before.name))
    taken = _taken(recorded, typed, output)
    for name in ("config", "image"):
        if name in taken:
            record.check_file(option_name(name), taken[name])
    for file in record.loras if "lora" in taken else ():
        record.check_file("--lora", file)
    checked = {name: read_value(kind, name, value) for name, value in taken.items()}
    folder = None if "model" in typed else read_folder(checked.get("model"))
    if folder is not None:
        record.check_class(folder.transformer_class, folder.location)
    return {**values, **checked, "output": output}


def _taken(recorded: dict[str, Any], typed: Set[str], output: Path) -> dict[str, Any]:
    """Return the recorded values that hold beside what was typed, for a file to write."""
    left_out = set(typed)
    if "prompts" in typed:
        left_out.add("prompt")
    if typed & {"quality", "config", "compare"}:  # about the sparse run
        left_out.add("dense")
    if "dense" in typed:
        left_out.add("quality")
    suffix = output.suffix.lower()
    if suffix in IMAGES:
        left_out.add("fps")
    if suffix != Path(recorded.get("output", "")).suffix.lower():  # encoders count differently
        left_out.add("crf")
    names = [name for name in REPEATED if name in recorded and name not in left_out]
    return {name: recorded[name] for name in names}


def read_options(kind: type[AnyOptions], values: dict[str, Any]) -> AnyOptions:
    """Return the options with these values; raise `UserError` where they are wrong."""
    declared = _declared(kind)
    checked = {
        name: read_value(kind, name, value) if name in declared and value is not None else value
        for name, value in values.items()
    }
    options = kind(**checked)
    options.check()
    return options


def read_value(kind: type[PrintOptions], name: str, value: object) -> Any:  # noqa: ANN401 - the field's type
    """Return the value of an option, checked; raise `UserError` where it is wrong."""
    hint = get_type_hints(kind, include_extras=True)[name]
    try:
        return TypeAdapter(hint, config=ConfigDict(allow_inf_nan=False)).validate_python(value)
    except ValidationError as error:
        wrong = error.errors(include_url=False)[0]
        cause = wrong.get("ctx", {}).get("error")
        if isinstance(cause, UserError):
            raise cause from None
        why = plain_words(wrong["msg"].removeprefix("Value error, "))
        text = f"{value:g}" if isinstance(value, float) else value
        raise UserError(f"{option_name(name)} {text} {why}") from None


def option_name(field: str) -> str:
    """Return ``--guidance-scale`` for ``guidance_scale``, and ``--from`` for ``from_``."""
    return f"--{field.rstrip('_').replace('_', '-')}"


def command_words(command: str, options: PrintOptions, resolved: dict[str, Any]) -> list[str]:
    """Return the words of the command that does the same again, for `shlex.join`.

    ``resolved`` has values in place of those that were typed, by the names of the fields.
    """
    names = [field.name for field in dataclasses.fields(options)]
    values = {**{name: getattr(options, name) for name in names}, **resolved}
    values.pop("from_", None)  # the other options have what it says
    declared = _declared(type(options)).items()
    arguments = [name for name, item in declared if item.make is typer.Argument]
    places = [str(values.pop(name)) for name in arguments if values[name] is not None]
    words: list[str] = []
    for name, value in values.items():
        if value is None or value is False or name in SHOWING or name in arguments:
            continue
        for item in value if isinstance(value, (list, tuple)) else (value,):
            words += [option_name(name)] if item is True else [option_name(name), str(item)]
    if any(place.startswith("-") for place in places):  # else it would be taken for an option
        return ["chipsparse", command, *words, "--", *places]
    return ["chipsparse", command, *places, *words]


def words_values(kind: type[PrintOptions], words: Sequence[str]) -> dict[str, Any]:
    """Return the values, by field and unchecked, of words such as `command_words` gives.

    Raises `UserError` for words of another command, or of options that there are no more.
    """
    if list(words[:2]) != ["chipsparse", "generate"]:
        raise UserError(f"the record is of another command: {' '.join(words[:2])}")
    fields = {option_name(name): name for name in _declared(kind)}
    hints = get_type_hints(kind)
    values: dict[str, Any] = {}
    places: list[str] = []
    rest = list(words[2:])  # behind ``chipsparse`` and the name of the command
    while rest:
        word = rest.pop(0)
        if word == "--":
            places += rest
            break
        if not word.startswith("--"):
            places.append(word)
            continue
        name = fields.get(word)
        is_flag = hints.get(name or "") is bool
        if name is None or not (is_flag or rest):
            raise UserError(f"the recorded command has {word}, which generate does not take")
        value = True if is_flag else rest.pop(0)
        values[name] = [*values.get(name, []), value] if name == "lora" else value
    if places:
        values["prompt"] = places[0]
    return values


def _declared(kind: type[PrintOptions]) -> dict[str, _Declared]:
    """Return the options and arguments by field, in the order of the help."""
    fields = [field for field in dataclasses.fields(kind) if "declared" in field.metadata]
    last = {field.name for field in dataclasses.fields(PrintOptions)}
    fields.sort(key=lambda field: field.name in last)
    return {field.name: field.metadata["declared"] for field in fields}


def _parameters(kind: type[PrintOptions]) -> list[inspect.Parameter]:
    types = get_type_hints(kind)
    defaults = {field.name: field.default for field in dataclasses.fields(kind)}
    parameters = []
    for name, item in _declared(kind).items():
        names = (option_name(name), *item.names) if item.make is typer.Option else ()
        typed = types[name]
        default = defaults[name]
        if any(get_origin(part) is Literal for part in (typed, *get_args(typed))):
            typed = str | None if default is None else str  # `read_value` knows the choices
        parameters.append(
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                annotation=Annotated[typed, item.make(*names, **item.words)],
                default=inspect.Parameter.empty if default is REQUIRED else default,
            ),
        )
    return parameters
