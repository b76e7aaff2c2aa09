"""Random-weight models of a few thousand parameters with the classes and shapes of the real ones.

They compute nothing meaningful, but run every code path of diffusers in about a second. The same
call gives the same weights, and leaves the global random state as it was.
"""

import diffusers
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

WORDS = """
a an the red green blue yellow white black circle square triangle moves left right up down over on
gradient background and grows shrinks
""".split()  # noqa: SIM905 - a list literal would take one line per word
PROMPT = "a red circle moves left over a blue gradient"
SPECIAL_TOKENS = ("<pad>", "</s>", "<unk>")
LATENT_CHANNELS = 4
# How solvers of several steps follow a straight flow.
FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
TEXT_DIM = 32

TRANSFORMER_CONFIG = {
    "num_layers": 3,
    "num_attention_heads": 2,
    "attention_head_dim": 32,
    "ffn_dim": 128,
    "in_channels": LATENT_CHANNELS,
    "out_channels": LATENT_CHANNELS,
    "patch_size": (1, 2, 2),
    "text_dim": TEXT_DIM,
    "freq_dim": 32,
    "rope_max_seq_len": 64,
    "cross_attn_norm": True,
    "qk_norm": "rms_norm_across_heads",
}

# Of all models with the blocks of FLUX.
JOINT_CONFIG = {
    "num_layers": 2,
    "num_single_layers": 3,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "in_channels": 4 * LATENT_CHANNELS,
    "patch_size": 1,
    "axes_dims_rope": (4, 6, 6),
    "joint_attention_dim": TEXT_DIM,
}
FLUX_CONFIG = {**JOINT_CONFIG, "pooled_projection_dim": TEXT_DIM, "guidance_embeds": False}

# Of text encoders; their vocabulary is that of `tiny_tokenizer`.
VOCABULARY = {"vocab_size": len(SPECIAL_TOKENS) + len(WORDS), "pad_token_id": 0, "eos_token_id": 1}
T5_CONFIG = {
    "d_model": TEXT_DIM,
    "d_kv": 16,
    "d_ff": 64,
    "num_layers": 1,
    "num_heads": 2,
    **VOCABULARY,
    "decoder_start_token_id": 0,
}


def tiny_wan_transformer(*, seed=0, **overrides):
    """A Wan transformer; `overrides` replace entries of its config, e.g. `num_layers=5`."""
    return seeded(diffusers.WanTransformer3DModel, seed=seed, **{**TRANSFORMER_CONFIG, **overrides})


def tiny_wan_pipeline(*, seed=0, **overrides):
    """A text-to-video Wan pipeline; `overrides` replace components or add its arguments."""
    components = {
        "tokenizer": tiny_tokenizer(),
        "text_encoder": tiny_text_encoder(seed=seed + 1),
        "vae": tiny_wan_vae(seed=seed + 2),
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        "transformer": tiny_wan_transformer(seed=seed),
    }
    return quiet(diffusers.WanPipeline(**{**components, **overrides}))


def tiny_wan_vae(vae_class=diffusers.AutoencoderKLWan, *, seed=2, **overrides):
    """A Wan VAE, or one like it; as the real one, it shrinks space by 8 and time by 4."""
    config = {
        "base_dim": 8,
        "z_dim": LATENT_CHANNELS,
        "dim_mult": [1, 1, 1, 1],
        "num_res_blocks": 1,
        "temperal_downsample": [False, True, True],
        "latents_mean": [0.0] * LATENT_CHANNELS,
        "latents_std": [1.0] * LATENT_CHANNELS,
    }
    return seeded(vae_class, seed=seed, **{**config, **overrides})


def tiny_text_encoder(kind="UMT5", *, seed=1):
    """A text encoder of this kind, UMT5 or T5."""
    config = getattr(transformers, f"{kind}Config")(**T5_CONFIG)
    return seeded(getattr(transformers, f"{kind}EncoderModel"), config, seed=seed)


def tiny_tokenizer(**options):
    """One token per word; ends each prompt as T5 does."""
    vocabulary = {word: index for index, word in enumerate([*SPECIAL_TOKENS, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    ends = [("</s>", vocabulary["</s>"])]
    tokenizer.post_processor = processors.TemplateProcessing("$A </s>", special_tokens=ends)
    options |= {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options)


def tiny_flux_transformer(*, seed=0, **overrides):
    """A FLUX.1 transformer; `overrides` replace entries of its config, e.g. `guidance_embeds`."""
    config = {**FLUX_CONFIG, **overrides}
    return strong(seeded(diffusers.FluxTransformer2DModel, seed=seed, **config), 8, FLUX_OUTPUTS)


def tiny_flux_pipeline(pipeline_class=diffusers.FluxPipeline, *, seed=0, **overrides):
    """A FLUX.1 pipeline of this class; `overrides` replace or add components."""
    components = {
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        "text_encoder": tiny_clip_encoder(seed=seed + 1),
        "tokenizer": tiny_tokenizer(model_max_length=77),
        "text_encoder_2": tiny_text_encoder("T5", seed=seed + 2),
        "tokenizer_2": tiny_tokenizer(),
        "vae": tiny_image_vae(seed=seed + 3),
        "transformer": tiny_flux_transformer(seed=seed),
    }
    return quiet(pipeline_class(**{**components, **overrides}))


def tiny_chroma_pipeline(*, seed=0):
    """A Chroma pipeline; like the real one it masks the padding of its prompt."""
    sizes = {"num_channels": 16, "hidden_dim": 32, "layers": 1}
    config = JOINT_CONFIG | {f"approximator_{name}": size for name, size in sizes.items()}
    transformer = seeded(diffusers.ChromaTransformer2DModel, seed=seed, **config)
    return quiet(
        diffusers.ChromaPipeline(
            scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
            vae=tiny_image_vae(seed=seed + 3),
            text_encoder=tiny_text_encoder("T5", seed=seed + 2),
            tokenizer=tiny_tokenizer(),
            transformer=strong(transformer, 8, FLUX_OUTPUTS),
        ),
    )


def tiny_image_vae(*, seed=3, blocks=2, **overrides):
    """An image VAE that shrinks by 2 per block but the first; `overrides` are of its config."""
    config = {
        "block_out_channels": (8,) * blocks,
        "down_block_types": ("DownEncoderBlock2D",) * blocks,
        "up_block_types": ("UpDecoderBlock2D",) * blocks,
        "layers_per_block": 1,
        "norm_num_groups": 4,
        "latent_channels": LATENT_CHANNELS,
        "use_quant_conv": False,
        "use_post_quant_conv": False,
        "scaling_factor": 0.5,
        "shift_factor": 0.1,
    }
    return seeded(diffusers.AutoencoderKL, seed=seed, **{**config, **overrides})


def tiny_clip_encoder(*, seed=1):
    config = {
        "hidden_size": TEXT_DIM,
        "projection_dim": TEXT_DIM,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 77,
        **VOCABULARY,
        "bos_token_id": 2,
    }
    return seeded(transformers.CLIPTextModel, transformers.CLIPTextConfig(**config), seed=seed)


def tiny_image_encoder(
    model_class=transformers.CLIPVisionModel,
    config_class=transformers.CLIPVisionConfig,
    dim=TEXT_DIM,
):
    """An image encoder of two layers for pictures of 16 x 16 pixels."""
    layers = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = config_class(hidden_size=dim, image_size=16, patch_size=8, **layers)
    return seeded(model_class, config, seed=4)


# How most models end their attention and feed-forward layers.
OUTPUTS = ("to_out.0", "net.2", "linear_out", "out_layer", "img_mlp.out", "blocks.0.proj_out")
FLUX_OUTPUTS = ("attn.to_out.0", "ff.net.2", ".proj_out")


def strong(model, factor=10, ends=OUTPUTS):
    """A model with larger block outputs, which at their first values hardly change the result."""
    with torch.no_grad():
        for name, module in model.named_modules():
            if name.endswith(ends) and isinstance(module, torch.nn.Linear):
                module.weight.mul_(factor)
    return model


def seeded(make, *args, seed=0, **options):
    """A module with random weights, the same at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make(*args, **options).eval()


def random(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def quiet(pipe):
    pipe.set_progress_bar_config(disable=True)
    return pipe
