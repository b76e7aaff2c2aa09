"""A denoising loop around a transformer, for models whose own pipelines need much besides it."""

import contextlib
from types import SimpleNamespace

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch.utils._pytree import tree_map


class Loop:
    """Calls a transformer as its pipeline does, without what encodes and decodes.

    Args:
        transformer: called in a cache context, if it has one, for each guidance branch.
        arguments: makes those of a call from the latents, the timestep ``[B]``, the branch and the
            arguments of the loop.
        shape: makes the latents' shape ``[B, ...]`` from the arguments of the loop.
        vae_config: says by how much the VAE would shrink a video.
        velocity: takes the velocity from what the transformer returns for latents.
    """

    def __init__(
        self, transformer, arguments, shape, vae_config, velocity=lambda result, _: result[0]
    ):
        self.transformer = transformer
        self.scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
        self.vae = SimpleNamespace(config=vae_config)
        self.components = {"transformer": transformer, "scheduler": self.scheduler}
        self._arguments, self._shape, self._velocity = arguments, shape, velocity

    def to(self, device, dtype):
        """Moves the transformer, which calls follow."""
        self.transformer.to(device, dtype)
        return self

    def _moved(self, value):
        """A tensor where the transformer is; vectors, such as timesteps, keep their dtype."""
        if not isinstance(value, torch.Tensor):
            return value
        wide = value.is_floating_point() and value.dim() > 1
        return value.to(self.transformer.device, self.transformer.dtype if wide else None)

    @torch.no_grad()
    def __call__(
        self,
        *,
        num_inference_steps,
        generator,
        output_type="latent",
        return_dict=False,
        branches=("cond", "uncond"),
        **call,
    ):
        """The latents after so many steps, in a tuple."""
        latents = self._moved(torch.randn(self._shape(**call), generator=generator))
        self.scheduler.set_timesteps(num_inference_steps)
        for timestep in self.scheduler.timesteps:
            found = [self._call(name, latents, timestep, call) for name in branches]
            velocity = 1.5 * found[0] - 0.5 * found[-1]
            latents = self.scheduler.step(velocity, timestep, latents, return_dict=False)[0]
        return (latents,)

    def _call(self, branch, latents, timestep, call):
        named = hasattr(self.transformer, "cache_context")
        context = self.transformer.cache_context(branch) if named else contextlib.nullcontext()
        arguments = self._arguments(latents, timestep.expand(len(latents)), branch, **call)
        arguments = tree_map(self._moved, arguments)
        with context:
            return self._velocity(self.transformer(**arguments, return_dict=False), latents)


# How the models of these families end their attention and feed-forward layers.
OUTPUTS = ("to_out.0", "net.2", "linear_out", "out_layer", "img_mlp.out", "blocks.0.proj_out")


def strong(model, factor=10):
    """A model with larger block outputs, which at their first values hardly change the result."""
    with torch.no_grad():
        for name, module in model.named_modules():
            if name.endswith(OUTPUTS) and isinstance(module, torch.nn.Linear):
                module.weight.mul_(factor)
    return model
