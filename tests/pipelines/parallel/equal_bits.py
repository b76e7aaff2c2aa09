"""Whole tiny generations that the ranks of the tests run, alone and together."""

from collections import Counter
from functools import partial

import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig

import chipsparse
from tests.pipelines.families import flux2, hunyuan_video, wan
from tests.pipelines.families.wan_kin import forced
from tests.pipelines.small_sparse import generate
from tests.pipelines.test_families import FAMILIES, SPARSE
from tests.tiny_models import tiny_wan_pipeline, tiny_wan_transformer

BOTH = chipsparse.Parallel(ulysses=2)
# A text of one whole block of the MLP. Linears round the last rows of others otherwise on a CPU.
TEXT = 16
WHOLE_BLOCKS = {
    "hunyuan video": {
        "prompt_embeds": hunyuan_video.random(1, TEXT, hunyuan_video.TEXT_DIM, seed=1),
        "prompt_attention_mask": torch.ones(1, TEXT, dtype=torch.long),
    },
    "flux2": {"prompt_embeds": flux2.random(1, TEXT, flux2.TEXT_DIM, seed=3)},
    "longcat-image": {"text": TEXT},
    "bria": {"text": TEXT},
}
SQUARE = {"height": 128, "width": 128}
BIG = {**wan.VIDEO, **SQUARE, "num_frames": 13}  # 16 blocks of 16 rows


def wan_of(heads, experts=1):
    sizes = {"num_attention_heads": heads, "attention_head_dim": 16}
    parts = {"transformer": tiny_wan_transformer(**sizes)}
    if experts == 2:
        second = tiny_wan_transformer(seed=9, **sizes)
        parts |= {"transformer_2": second, "boundary_ratio": 0.95}
    return tiny_wan_pipeline(**parts)


def announced(name):
    """A family's loop that tells, as the family's own pipeline does, that it guides."""
    pipe = FAMILIES[name].make()
    pipe.do_classifier_free_guidance = True
    return pipe


HUNYUAN = {**FAMILIES["hunyuan video"].call, **WHOLE_BLOCKS["hunyuan video"], **SQUARE}
OTHERS = {
    "four heads": (lambda: wan_of(4), BIG, {}),
    "uneven heads": (lambda: wan_of(5), BIG, {}),
    "joint text, four heads": (lambda: hunyuan_video.pipeline(num_attention_heads=4), HUNYUAN, {}),
    "two experts": (lambda: wan_of(4, experts=2), {**BIG, "height": 80, "width": 48}, {}),
    "skipped, with a forecast": (
        lambda: wan_of(4),
        {**BIG, "num_inference_steps": 10},
        {"schedule": {"listed": {"full": [0, 1, 4, 7]}, "forecast": 0.5}},
    ),
    "caches in e4m3": (lambda: wan_of(4), BIG, {"memory.cache_precision": "fp8"}),
    "attention alone": (lambda: wan_of(4), BIG, {"mlp.density": "dense"}),
    **{
        f"{name}, announced": (partial(announced, name), FAMILIES[name].call, {})
        for name in ("chrono edit", "longcat-image", "skyreels v2", "wan animate")
    },
    "nothing sparse": (lambda: wan_of(4), BIG, {"schedule.actions": ["dense"]}),
}


# Cases whose pipelines guide by calls of their own.
GUIDED = [
    "four heads",
    "two experts",
    "skipped, with a forecast",
    "flux2 klein",
    "chrono edit, announced",
    "longcat-image, announced",
    "skyreels v2, announced",
    "wan animate, announced",
    "wan vace",
]
# Families whose tokens cannot be shared, and why.
REASONS = {
    "bria-fibo2": "blocks before the main ones see the image or the text alone",
    "chroma": "the pipeline passes an attention mask",
    "cosmos 3": "it finds rows of text, sound and video by their places",
    "flux3": "blocks before the joint ones see the image or the text alone",
    "framepack": "its blocks tell earlier frames from present ones",
    "helios": "its blocks tell earlier frames from present ones",
    "hidream": "it cuts images into tokens itself",
    "hunyuan video image to video, tokens replaced": "it modulates the tokens of the first frame",
    "kandinsky 6": "its sound attends to all tokens of the video",
    "ltx-2": "its sound attends to all tokens of the video",
    "minimax h3": "it finds rows of text, sound and video by their places",
    "ovis-image": "its tokens cannot be shared yet",
    "qwen-image 2.1": "its first step, which keeps keys of the prompt",
    "sd3.5 medium": "its second attention (attn2, in dual layers) is not exchanged",
    "wan animate": "its blocks see faces frame by frame",
    "z-image": "layers before the joint ones see the image or the text alone",
}


def case(name):
    """The function that makes a pipeline, its call, and changes of the config."""
    if name in OTHERS:
        return OTHERS[name]
    family, _, variant = (name, "", "") if name in FAMILIES else name.partition(", ")
    found = FAMILIES[family]
    extra = found.variants[variant] if variant else WHOLE_BLOCKS.get(family, {})
    return found.make, {**found.call, **extra}, {}


def everything(names):
    """The findings of `together`, also of guidance branches, and of what diffusers shared."""
    return {
        **together(names),
        "guidance": together(GUIDED, guidance=2),
        "whole": {name: said(FAMILIES[name].make(), FAMILIES[name].call) for name in REASONS},
        "forced": said(forced(), FAMILIES["skyreels v2"].call),
        "unguided": said(
            wan_of(4),
            {**BIG, "guidance_scale": 1.0},
            parallel=chipsparse.Parallel(guidance=2),
        ),
        "stock": {name: stock(name) for name in ("plain", "compiled")},
        "ring degree": said_of_ring_degree(),
    }


def four(ways):
    """`together` of four ranks, by name of each way: its cases, and ranks that share guidance."""
    return {name: together(*way) for name, way in ways.items()}


def together(names, guidance=1):
    """By name, what is found of each case; one rank of several computes it alone as well."""
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    parallel = chipsparse.Parallel(ulysses=ranks // guidance, guidance=guidance)
    with torch.no_grad():
        return {
            name: compared(name, parallel, judge=place % ranks == rank)
            for place, name in enumerate(names)
        }


def said(pipe, call, config=SPARSE, *, parallel=BOTH, seed=0):
    """The error of a generation, or of `enable` before it."""
    try:
        with torch.no_grad(), chipsparse.enable(pipe, config, parallel=parallel):
            generate(pipe, call, seed=seed)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def compared(name, parallel, *, judge):
    make, call, changes = case(name)
    config = SPARSE.override(changes)
    found, report = run(make(), call, config, parallel)
    result = {"ranks agree": ranks_agree(found), "layers": report_of_layers(report)}
    if judge:
        alone, expected = run(make(), call, config, None)
        result["difference"] = largest_difference(found, alone)
        result["cache share"] = report.cache_bytes / max(1, expected.cache_bytes)
        result["same actions"] = report.actions() == expected.actions()
        result["same layers"] = result["layers"] == report_of_layers(expected)
    return result


def run(pipe, call, config, parallel):
    with chipsparse.enable(pipe, config, parallel=parallel) as handle:
        return generate(pipe, call), handle.report


def report_of_layers(report):
    """How many layers of all steps ran in each way, by part and action."""
    return Counter(f"{each.part} {each.action}" for step in report.steps for each in step.layers)


def ranks_agree(tensor):
    others = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(others, tensor.contiguous())
    return all(torch.equal(each, tensor) for each in others)


def largest_difference(found, alone):
    return float((found - alone).abs().max() / alone.abs().max())


def stock(name):
    """A pipeline that diffusers made parallel: before, while and after it is patched."""
    call = {**BIG, "guidance_scale": 1.0}
    with torch.no_grad():
        alone, _ = run(wan_of(4), call, SPARSE, None)
        pipe = wan_of(4)
        pipe.transformer.enable_parallelism(
            config=ContextParallelConfig(ulysses_degree=dist.get_world_size()),
        )
        before = generate(pipe, call)
        with chipsparse.enable(pipe, SPARSE):
            if name == "compiled":
                pipe.transformer.compile_repeated_blocks(backend="aot_eager", fullgraph=True)
            patched = generate(pipe, call)
            again = generate(pipe, call)
        after = generate(pipe, call) if name != "compiled" else before
    return {
        "patched as alone": torch.equal(patched, alone),
        "difference": largest_difference(patched, alone),
        "sparse": not torch.equal(patched, before),
        "again the same": torch.equal(patched, again),
        "restored": torch.equal(before, after),
    }


def said_of_ring_degree():
    pipe = wan_of(4)
    pipe.transformer.enable_parallelism(
        config=ContextParallelConfig(ring_degree=dist.get_world_size()),
    )
    return said(pipe, BIG, parallel=None)
