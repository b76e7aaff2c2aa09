"""HiDream-I1: text of three kinds behind the image, and padding where that is not square."""

from diffusers import HiDreamImagePipeline, HiDreamImageTransformer2DModel

from tests.pipelines.families.family import HEADS, Family, of_class, strong
from tests.tiny_models import LATENT_CHANNELS, random, seeded, tiny_image_vae

EDGE = 16  # of latents; the pipeline makes images of about as many pixels, whatever is asked
TEXT = 5
TEXT_DIM = 16
POOLED_DIM = 24
CONFIG = {
    "patch_size": 2,
    "in_channels": LATENT_CHANNELS,
    "num_layers": 2,
    "num_single_layers": 2,
    **HEADS,
    "caption_channels": [TEXT_DIM, TEXT_DIM],
    "text_emb_dim": POOLED_DIM,
    "num_routed_experts": 0,
    "axes_dims_rope": (8, 4, 4),
    "max_resolution": (EDGE, EDGE),
    "llama_layers": [0, 1, 2, 3],
}


def pipeline(**overrides):
    """With blocks that change something; `overrides` are of the transformer's config."""
    model = seeded(HiDreamImageTransformer2DModel, **{**CONFIG, **overrides})
    parts = {"vae": tiny_image_vae(), "transformer": strong(model, 5, ("to_out", "w2"))}
    made = of_class(HiDreamImagePipeline, **parts)
    made.default_sample_size = EDGE
    return made


def experts():
    return pipeline(num_routed_experts=4)


def prompts(prefix="", batch=1, seed=3):
    layers = len(CONFIG["llama_layers"])
    return {
        f"{prefix}prompt_embeds_t5": random(batch, TEXT, TEXT_DIM, seed=seed),
        f"{prefix}prompt_embeds_llama3": random(layers, batch, TEXT, TEXT_DIM, seed=seed + 1),
        f"{prefix}pooled_prompt_embeds": random(batch, POOLED_DIM, seed=seed + 2),
    }


SQUARE = {"height": 2 * EDGE, "width": 2 * EDGE}
IMAGE = {**SQUARE, **prompts(), "guidance_scale": 0.0, "max_sequence_length": TEXT}
VARIANTS = {
    "odd size": {"height": 24, "width": 40},
    "batch": prompts(batch=2),
    "guided": {"guidance_scale": 3.0, **prompts("negative_", seed=7)},
}
EXPERTS_DENSE = ("the 4 routed experts of each layer run dense",)
FAMILIES = [
    # Projections of text are compiled, too.
    Family("hidream", pipeline, IMAGE, VARIANTS, kinds=3),
    Family("hidream experts", experts, IMAGE, VARIANTS, EXPERTS_DENSE, brief=True),
]
