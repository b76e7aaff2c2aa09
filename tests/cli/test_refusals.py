"""What a command cannot do: one sentence, exit code 2, nothing written and no model loaded."""

import shutil
import sys

import numpy as np
import pytest
from PIL import Image

from chipsparse.cli.media import write as media
from tests.cli.conftest import PROFILE, change_json, command, nothing_written
from tests.tiny_models import PROMPT

PROMPTS = f"{PROMPT}\na blue square moves up\na white triangle grows\n"
LAYERS = "layers[0].index: names layer 9, but this model has 3 layers, 0 to 2"
FILES = {
    "prompts.txt": PROMPTS,
    "one.txt": "a red circle\n\n",
    "twice.txt": f"{PROMPTS}{PROMPT}\n",
    "prompts.csv": "prompt\na\nb\n",
    "bad.yaml": f"{PROFILE}  colour: red\n",
    "long.yaml": PROFILE.replace("inference_steps: 4", "inference_steps: 6"),
    "layers.yaml": f"{PROFILE}  layers: [{{index: 1-9, mlp: dense}}]\n",
}
# The models: a folder that makes videos, one that makes images, and one that starts from an image.
VIDEO = "--model VIDEO"
FLUX = "--model FLUX"
IMAGE_TO_VIDEO = "--model IMAGE_TO_VIDEO"
GENERATE = f"generate x -o o.gif {VIDEO}"
COMPARE = f"{VIDEO} --prompts prompts.txt"
TUNE = f"tune {FLUX} --prompts twice.txt -o p.yaml --calibration-prompts 1 --held-out-prompts 2"
RANKS = f"{FLUX} --device cpu"
BATCH = f"batch prompts.csv --device cpu {VIDEO}"
SUITE = "compare --suite VIDEO"
MISTAKES = {
    # What the model and the machine decide.
    f"{GENERATE} --height 40": "--height 40 does not fit * a multiple of 16; use 32 or 48",
    f"{GENERATE} --frames 260": "--frames 260 is too large for this model; * is 253",
    f"{GENERATE} --vram 8G --device cpu": "--vram 8G has no effect on a CPU; use --ram",
    f"{GENERATE} --device cuda": "--device cuda needs a CUDA GPU *; use --device cpu",
    f"generate x -o o.mp4 {VIDEO}": "no ffmpeg was found to write .mp4",
    "generate x -o o.gif --model a/model": "a/model is neither a folder * hub: no route to host",
    f"{GENERATE} --config layers.yaml": f"layers.yaml: *{LAYERS}",
    f"generate x -o o.gif {IMAGE_TO_VIDEO}": "* starts from an image; give one with --image",
    f"generate x -o o.gif {IMAGE_TO_VIDEO} --image start.png --strength 0.5": "* has no strength",
    f"{GENERATE} --image start.png": "WanPipeline takes no image; leave --image out",
    # Comparisons of configs.
    f"compare dense profile {COMPARE} --count 1": "--count 1: intervals need at least 2 prompts",
    f"compare dense profile {COMPARE} --count 4": "prompts.txt has 3 prompts; --count 4 asks for",
    f"compare dense profile {COMPARE} --with-prompts": "--with-prompts is about a suite; give",
    f"compare dense profile {COMPARE} --fps 8": "--fps is about --output, and there is none",
    f"compare dense bad.yaml {COMPARE}": "bad.yaml: sparsity.colour",
    f"compare dense dense {COMPARE}": "both are the stock model; give a config to compare it with",
    f"compare dense FluxTransformer2DModel {COMPARE}": "* is for FluxTransformer2DModel, but",
    f"compare profile long.yaml {COMPARE}": "A generates with num_inference_steps 4 and B with 6",
    f"compare dense profile {VIDEO} --prompts one.txt": "one.txt has 1 prompt; intervals need at",
    # Comparisons of files.
    "compare a.png c.gif": "a.png has 5 frames and c.gif has 4; only clips of one size and",
    "compare a.png d.png": "a.png has 48x32 pixels and d.png has 40x32; only clips of one",
    "compare a.png b.png -o a.png": "--output a-000.png would replace a-000.png, which is",
    "compare a.png b.png --steps 4": "--steps is about generations; A and B are taken for",
    "compare a.png dense": "dense is a config and a.png is taken for a file; compare two files",
    "compare a.png": "give two files or two configs to compare, or a model with --suite",
    # Suites.
    f"{SUITE} --num 13": "*suite.txt has 12 prompts; --count 13 asks for more",
    f"{SUITE} -o one.txt": "--output one.txt is a file; a suite fills a folder",
    "compare dense --suite VIDEO": "A is not for a suite, which has its own methods",
    f"{SUITE} --amplify 2": "--amplify is not for a suite",
    f"{SUITE} --gpus 2": "--suite compares methods that one GPU runs; leave --g",
    # Searches.
    TUNE: "give a target: one or more of --min-psnr, --min-ssim, --max-lpips, --min-speedup",
    f"{TUNE} --min-speedup 0.9": "--min-speedup 0.9 must be greater than 1",
    f"{TUNE} --min-psnr 30 --budget 6": "--budget 6 is too small: 1 prompts * need at least 7",
    f"{TUNE} --min-psnr 30 --steps 3": "*at least 4 denoising steps, got 3",
    f"{TUNE} --min-psnr 30 --held-out-prompts 5": "twice.txt has 3 different * 6 are needed: 1 to",
    f"{TUNE} --max-lpips 0.1": "--max-lpips cannot be measured * (pip install 'chipsparse[lpips]')",
    # Several processes.
    f"{TUNE} {RANKS} --min-psnr 25 --guidance-parallel 2": "*multiple of 2 GPUs, and there are to",
    f"compare dense profile {RANKS} --gpus 2 --guidance-parallel 2": "*2DModel do not say before",
    f"generate x -o o.png {RANKS} --gpus 4": "*2 attention heads, fewer than the 4 processes",
    # Batches.
    f"{BATCH} -o out --format png --fps 24": "--fps is about .mp4, .webm and .gif, and .png has",
    f"{BATCH} -o out --format webp": "a video of 5 frames is no single .webp; use --format mp4",
    f"generate x -o o.jpg {VIDEO}": "o.jpg is for one image, not for a video; use one of .mp4, .we",
    f"{BATCH} -o out --format png": "a video of 5 frames is no single .png; use --format mp4",
    f"{BATCH} -o prompts.csv": "--output prompts.csv is a file; name a folder",
    f"batch prompts.csv -o out {RANKS} --format mp4": "this model makes images, not videos; use",
}


@pytest.fixture
def models(model_folder, flux_folder, image_to_video_folder):
    """The folders of the models by the words that stand for them."""
    return {"VIDEO": model_folder, "FLUX": flux_folder, "IMAGE_TO_VIDEO": image_to_video_folder}


@pytest.fixture
def elsewhere(monkeypatch):
    """A machine without a GPU, torchmetrics and network, on which no process can be started."""

    def missing(*_, **__):
        raise RuntimeError("no route to host\nand a long explanation")

    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", missing)
    monkeypatch.setattr("torch.distributed.run.elastic_launch", missing)
    monkeypatch.setitem(sys.modules, "torchmetrics", None)
    return missing


def clip(frames=5, width=48):
    """Frames that differ, so that a GIF keeps each."""
    return np.broadcast_to(np.arange(frames, dtype=np.uint8), (3, width, 32, frames)).T.copy()


@pytest.mark.parametrize("line", MISTAKES)
def test_what_a_command_cannot_do(line, models, workdir, elsewhere, loads_nothing, monkeypatch):
    for name, text in FILES.items():
        (workdir / name).write_text(text)
    clips = {"a.png": clip(), "b.png": clip(), "c.gif": clip(frames=4), "d.png": clip(width=40)}
    media.write_media({workdir / name: frames for name, frames in clips.items()}, fps=8)
    Image.new("RGB", (48, 32)).save("start.png")
    if ".mp4" in line:
        monkeypatch.setattr("imageio_ffmpeg.get_ffmpeg_exe", elsewhere)
    words = [str(models.get(word, word)) for word in line.split()]
    with nothing_written(workdir):
        said = command(*words).sentence()
    start, *others = MISTAKES[line].split("*")
    assert said.startswith(start)
    assert all(part in said for part in others), said


@pytest.mark.parametrize(("line", "extra"), [(f"{BATCH} -o out --gpus 2", "ray"), ("studio",) * 2])
def test_packages_that_are_not_installed(line, extra, models, workdir, monkeypatch):
    (workdir / "prompts.csv").write_text(FILES["prompts.csv"])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    said = command(*(models.get(word, word) for word in line.split())).sentence()
    assert said.endswith(f"not installed: pip install 'chipsparse[{extra}]'")


# Folders of models: the file that is spoilt, its text or what is changed in its JSON, the sentence.
INDEX = "model_index.json"
MODULAR = "modular_model_index.json"
SPOILT = [
    (INDEX, None, "is not a diffusers model folder: it has no model_index.json"),
    (INDEX, '{"_class_name": "Wan', "model_index.json is not valid JSON"),
    (INDEX, {"_class_name": "NoSuchPipeline"}, "is NoSuchPipeline, which is no"),
    (INDEX, '{"_class_name": "WanPipeline"}', "has no diffusion transformer"),
    (INDEX, {"scheduler": ["diffusers", "FlowMatchHeunDiscreteScheduler"]}, "transformer 2 times"),
    (INDEX, {"transformer": ["diffusers", "NoSuchOne"]}, "the class diffusers.NoSuchOne, which"),
    (INDEX, {"vae_2": ["diffusers", "AutoencoderKL"]}, "names vae_2, but there is no folder"),
    (INDEX, {"text_encoder": [None] * 2}, "has no text encoder, so WanPipeline cannot read a"),
    ("transformer/config.json", None, "it has no transformer/config.json"),
    ("transformer/config.json", {"attention_head_dim": "wide"}, "makes no WanTransformer3DModel: "),
    (MODULAR, {"_class_name": "Flux9ModularPipeline"}, "is Flux9ModularPipeline, which is no Mod"),
    (MODULAR, {"_blocks_class_name": "Flux9Blocks"}, "_blocks_class_name of the model"),
    (MODULAR, {"transformer": None}, "has no diffusion transformer"),
]


@pytest.mark.parametrize(("file", "change", "sentence"), SPOILT)
def test_folders_that_are_no_whole_model(
    file,
    change,
    sentence,
    model_folder,
    modular_folder,
    workdir,
    loads_nothing,
    tmp_path_factory,
):
    source = modular_folder if file == MODULAR else model_folder
    folder = shutil.copytree(source, tmp_path_factory.mktemp("spoilt") / "tiny")
    if change is None:
        (folder / file).unlink()
    elif isinstance(change, str):
        (folder / file).write_text(change)
    else:
        change_json(folder / file, **change)
    with nothing_written(workdir):
        said = command("generate", "x", "-o", "o.gif", "--model", folder).sentence()
    assert sentence in said
