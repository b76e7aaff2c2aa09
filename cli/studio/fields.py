"""The fields of the page, and what they have for a model."""

from __future__ import annotations

from typing import Any

import gradio as gr

from chipsparse.cli.errors import UserError
from chipsparse.cli.model.description import ModelDescription
from chipsparse.cli.model.schedulers import compatible_schedulers
from chipsparse.cli.settings import guidance_argument
from chipsparse.cli.studio.labels import LABELS
from chipsparse.cli.studio.run import Studio
from chipsparse.cli.views.names import bundled_name
from chipsparse.profiles.profile import ASSETS, BUNDLED_MODELS

NUMBERS = ("height", "width", "frames", "steps", "guidance_scale")
ALSO = "Also takes a folder, or a name of the Hugging Face hub."
TOY = "A toy that was trained on simple shapes and draws nothing else."
NO_IMAGE = "Takes no image to start from."
QUALITY = (
    "faithful computes most and is closest to dense, draft computes least. chipmunk is the "
    "schedule that was published first, to compare with."
)
EMPTY_FIELDS = "An empty field takes the value that it shows in grey."
LORA = "A .safetensors file, a folder with one, or a name of the Hugging Face hub."
EXAMPLES = {
    "tiny-wan": "a red circle moves left over a blue gradient",
    "tiny-flux": "a red circle to the left of a blue square over a gray gradient",
}
SUGGESTED = "For example: a cat walks on the grass"
RANDOM_SEED = "() => String(Math.floor(Math.random() * 2 ** 32))"
Fitting = dict[str, dict[str, Any]]


def form(studio: Studio) -> tuple[dict[str, Any], gr.Button]:
    """Return the fields as they begin, by the option that each is, and the button of the seed."""
    typed = studio.options
    model = studio.first_model
    here = [name for name in BUNDLED_MODELS if (ASSETS / name).is_dir()]
    models = [(f"{name} (bundled)", str(ASSETS / name)) for name in here]
    if model not in [place for _, place in models]:
        models.insert(0, (model, model))
    first = fitting(studio, model)
    fields: dict[str, Any] = {
        "model": gr.Dropdown(
            models,
            value=model,
            label=LABELS["model"],
            allow_custom_value=True,
            **first["model"],
        ),
        "prompt": gr.Textbox(
            example(model),
            label=LABELS["prompt"],
            lines=3,
            placeholder=SUGGESTED,
        ),
        "image": gr.Image(
            label=LABELS["image"],
            type="filepath",
            format="png",
            sources=["upload", "clipboard"],
            height=160,
            buttons=[],
            **first["image"],
        ),
        "quality": gr.Radio(label=LABELS["quality"], info=QUALITY, **first["quality"]),
    }
    with gr.Row():
        fields["seed"] = number("seed", value=str(typed.seed), placeholder=str(typed.seed))
        dice = gr.Button("\N{DIE FACE-5} Random seed", elem_id="dice", size="md", min_width=140)
    fields["compare"] = gr.Checkbox(True, label=LABELS["compare"])
    with gr.Accordion("More settings", open=False):
        gr.HTML(f'<p class="cs-hint">{EMPTY_FIELDS}</p>')
        with gr.Row():
            for name in (*NUMBERS, "strength"):
                fields[name] = number(name, **first[name])
        negative = gr.Textbox(typed.negative_prompt or "", label=LABELS["negative_prompt"])
        fields["negative_prompt"] = negative
        with gr.Row():
            fields["scheduler"] = gr.Dropdown(
                label=LABELS["scheduler"],
                min_width=200,
                **first["scheduler"],
            )
            fields["flow_shift"] = number("flow_shift", min_width=160, **first["flow_shift"])
        with gr.Row():
            fields["lora"] = gr.Textbox(label=LABELS["lora"], info=LORA, min_width=200)
            fields["lora_scale"] = number("lora_scale", min_width=120, placeholder="1")
    for name, field in fields.items():
        field.elem_id = name
    return fields, dice


def number(name: str, *, min_width: int = 90, **properties: Any) -> gr.Textbox:
    """Return a field of a number.

    A text can be empty, is not rounded, and holds every seed; `generate` checks what it says.
    """
    return gr.Textbox(label=LABELS[name], max_lines=1, min_width=min_width, **properties)


def example(model: str) -> str:
    """Return a prompt that suits a bundled model; nothing for other models."""
    return EXAMPLES.get(bundled_name(model) or "", "")


def fitting(studio: Studio, model: str) -> Fitting:
    """Return what fields have for a model, and whether it has them; raise `UserError`."""
    request = studio.resolve({"model": model}, complete=False)
    profile = request.profile
    assert profile is not None
    starting = from_image(request.model)
    facts = [
        TOY if bundled_name(model) else "",
        f"{request.model.transformer_class}, {request.dtype_name} on {request.device}.",
        NO_IMAGE if starting is None else "",
        ALSO,
    ]
    called = {
        "frames": "num_frames",
        "steps": "num_inference_steps",
        "guidance_scale": guidance_argument(request.model),
    }
    defaults = {name: getattr(request.settings, called.get(name, name)) for name in NUMBERS}
    defaults["strength"] = None if starting is None else starting.default("strength")
    schedulers = compatible_schedulers(request.model)
    shift = request.options.flow_shift
    return {
        "model": {"info": " ".join(fact for fact in facts if fact)},
        "image": {"value": None, "visible": starting is not None},
        "quality": {
            "choices": list(profile.qualities),
            "value": profile.quality,
            "visible": bool(profile.qualities),
        },
        **{name: empty_number(default) for name, default in defaults.items()},
        "scheduler": {
            "choices": [("the model's own", ""), *((name, name) for name in schedulers)],
            "value": "",
        },
        "flow_shift": {
            "value": "",
            "placeholder": "the scheduler's own" if shift is None else f"{shift:g}",
        },
    }


def empty_number(default: float | None) -> dict[str, Any]:
    """Return a field that shows what it takes while it is empty; hidden where a model has none."""
    shown = None if default is None else f"{default:g}"
    return {"value": "", "placeholder": shown, "visible": default is not None}


def from_image(model: ModelDescription) -> ModelDescription | None:
    """Return the model as it starts from an image; None where it takes none."""
    try:
        return model.from_image()
    except UserError:
        return None
