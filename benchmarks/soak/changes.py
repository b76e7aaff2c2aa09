"""What users change before a call and between its steps; all of it is taken back after the run."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch.utils import _pytree as pytree

from benchmarks.soak.choices import Event
from benchmarks.soak.kept import Kept, linears
from benchmarks.soak.subjects import Place, transformers_of

CACHE_THRESHOLD = 0.15
PICTURE_VAES = ("AutoencoderKL", "AutoencoderKLFlux2")  # the others decode frames


class Stage:
    """A pipeline in the middle of a run; ``kept`` is as it was before, ``undo`` takes changes back.

    Attributes:
        report: of the handle, or None.
    """

    def __init__(self, pipe: Any, place: Place, kept: Kept, undo: ExitStack) -> None:
        self.pipe, self.place, self.kept, self.undo = pipe, place, kept, undo
        self.report: Any = None
        self._lora: dict[int, str] = {}

    def apply(self, event: Event, given: dict[str, Any] | None = None) -> dict[str, Any]:
        """Makes a change; takes what the pipeline gave its callback, gives what that returns."""
        change = CHANGES[event.name]
        return change(self, random.Random(event.seed), given or {}) or {}

    def transformer(self, draw: random.Random) -> Any:
        """One of the pipeline's transformers."""
        return draw.choice(transformers_of(self.pipe))

    def lora(self, draw: random.Random, _given: dict[str, Any]) -> None:
        """Adds a LoRA; the next time scales, disables, fuses or removes it, and so on."""
        model = self.transformer(draw)
        state = self._lora.get(id(model), "none")
        choices = {
            "none": ("add",),
            "active": ("scale", "scale", "disable", "fuse", "unload"),
            "disabled": ("enable", "unload"),
            "fused": ("unfuse",),
        }
        action = draw.choice(choices[state])
        if action == "add":
            self._add_lora(model, draw)
            self.undo.callback(self._unload, model)
        elif action == "scale":
            model.set_adapters(["style"], [draw.choice((0.3, 1.7))])
        elif action == "unload":
            self._unload(model)
        else:
            getattr(model, f"{action}_lora")()
        after = {"disable": "disabled", "fuse": "fused", "unload": "none"}
        self._lora[id(model)] = after.get(action, "active")

    def _add_lora(self, model: Any, draw: random.Random) -> None:
        import peft

        names = [name for name, _ in linears(model)]
        targets = "|".join(re.escape(name) for name in draw.sample(names, 2))
        with torch.random.fork_rng(devices=_devices(self.place.device)):
            torch.manual_seed(draw.randrange(100))
            config = peft.LoraConfig(
                r=2, lora_alpha=4, target_modules=f"^({targets})$", init_lora_weights=False
            )
            model.add_adapter(config, adapter_name="style")

    def _unload(self, model: Any) -> None:
        if getattr(model, "peft_config", None):
            model.unload_lora()
            for name in ("_hf_peft_config_loaded", "_safe_fusing", "lora_scale"):  # left by PEFT
                vars(model).pop(name, None)

    def weights(self, draw: random.Random, _given: dict[str, Any]) -> None:
        """Other weights in a linear: in its memory, or in other memory."""
        _, linear = draw.choice(list(linears(self.transformer(draw))))
        with torch.no_grad():
            if draw.random() < 0.5:
                linear.weight.mul_(1.25)
            else:
                linear.weight.data = linear.weight.data * 0.75

    def hook(self, draw: random.Random, _given: dict[str, Any]) -> None:
        """A hook on a linear or an attention module, which changes what it returns or does not."""
        factor = draw.choice((1.0, 1.1))
        model = self.transformer(draw)
        modules = [module for _, module in linears(model)]
        modules += [module for module in model.modules() if hasattr(module, "processor")]

        def change(_module: Any, _args: Any, output: Any) -> Any:
            if factor == 1.0:
                return None
            return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor * factor, output)

        self.undo.callback(draw.choice(modules).register_forward_hook(change).remove)

    def processor(self, draw: random.Random, _given: dict[str, Any]) -> None:
        """A new processor of the stock class on an attention module."""
        model = self.transformer(draw)
        names = {module: name for name, module in self.kept.modules.items()}
        modules = [each for each in model.modules() if hasattr(each, "processor")]
        module = draw.choice([each for each in modules if each in names])
        module.processor = type(self.kept.stock_processor(names[module]))()

    def guidance(self, draw: random.Random, _given: dict[str, Any]) -> None:
        """Switches guidance off, or gives it another scale."""
        if self.pipe._guidance_scale > 1:
            self.pipe._guidance_scale = draw.choice((1.0, 1.0, 6.0))

    def prompt(self, draw: random.Random, given: dict[str, Any]) -> dict[str, Any]:
        """Other embeddings of the prompt: another tensor, or other values of the same one."""
        embeds = given["prompt_embeds"]
        if draw.random() < 0.5:
            return {"prompt_embeds": embeds * 0.5}
        return {"prompt_embeds": embeds.mul_(-1)}

    def dtype(self, _draw: random.Random, _given: dict[str, Any]) -> None:
        """All models in the other one of two dtypes."""
        half = self.pipe.transformer.dtype == torch.bfloat16
        self.pipe.to(torch.float32 if half else torch.bfloat16)

    def interrupt(self, _draw: random.Random, _given: dict[str, Any]) -> None:
        """What a user's stop button sets."""
        self.pipe._interrupt = True

    def cache_on_top(self, _draw: random.Random, _given: dict[str, Any]) -> None:
        """A cache of diffusers; the next time it is taken off."""
        from diffusers.hooks import FirstBlockCacheConfig

        for model in transformers_of(self.pipe):
            if model.is_cache_enabled:
                model.disable_cache()
            else:
                model.enable_cache(FirstBlockCacheConfig(threshold=CACHE_THRESHOLD))
                self.undo.callback(_take_off_cache, model)

    def preview(self, _draw: random.Random, _given: dict[str, Any]) -> None:
        """A small picture decoded between two steps."""
        vae = self.pipe.vae
        channels = getattr(vae.config, "z_dim", None) or vae.config.latent_channels
        frames = () if type(vae).__name__ in PICTURE_VAES else (1,)
        latents = torch.zeros(1, channels, *frames, 4, 4, device=self.place.device)
        vae.decode(latents.to(vae.dtype), return_dict=False)

    def report_read(self, _draw: random.Random, _given: dict[str, Any]) -> None:
        """The report while it is being written."""
        if self.report is not None:
            self.report.to_dict()


CHANGES: dict[str, Callable[[Stage, random.Random, dict[str, Any]], dict[str, Any] | None]] = {
    "LoRA": Stage.lora,
    "weights": Stage.weights,
    "hook": Stage.hook,
    "processor": Stage.processor,
    "guidance": Stage.guidance,
    "prompt": Stage.prompt,
    "dtype": Stage.dtype,
    "interrupt": Stage.interrupt,
    "cache on top": Stage.cache_on_top,
    "preview": Stage.preview,
    "report read": Stage.report_read,
}


def _take_off_cache(model: Any) -> None:
    if model.is_cache_enabled:
        model.disable_cache()


def _devices(device: torch.device) -> list[Any]:
    return [device] if device.type == "cuda" else []
