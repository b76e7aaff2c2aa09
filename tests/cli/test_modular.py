"""The command with a model that a modular pipeline of diffusers runs."""

import json
import shutil

import numpy as np
import torch
from PIL import Image

import chipsparse
from chipsparse.pipelines.call import call_pipeline
from chipsparse.sparse.cache.memory_plan import BudgetError
from chipsparse.sparse.session import SparseSession
from tests.cli.conftest import CALL, change_json, command, modular_flux, names
from tests.pipelines.families.ltx import tiny_ltx_pipeline
from tests.pipelines.modular_families import FAMILIES
from tests.tiny_models import PROMPT

INDEX = "modular_model_index.json"


def test_generate_writes_what_the_patched_pipeline_makes(generate, modular_folder, workdir, capfd):
    given = ("-o", "out.png", "--seed", "3", "--compare", "--json")
    content = generate(*given, model=modular_folder).json()
    assert "it/s" not in capfd.readouterr().err  # no bars of the pipeline's own
    assert content["request"]["pipeline_class"] == "FluxModularPipeline"
    taken = [step["action"] for step in content["sparse"]["steps"]]
    assert taken == ["dense", "refresh", "sparse", "sparse"]
    pipe = modular_flux()
    options = {"guidance_scale": 3.5, "output_type": "np", "output": "images"}  # the usual scale
    with chipsparse.enable(pipe, modular_folder / "chipsparse.yaml"):
        generator = torch.Generator().manual_seed(3)
        (expected,) = pipe(prompt=PROMPT, generator=generator, **CALL, **options)
    written = np.asarray(Image.open("out.png"))
    np.testing.assert_array_equal(written, np.rint(expected * 255).astype(np.uint8))
    assert names(workdir) == ["out-compare.png", "out-dense.png", "out.png"]


def test_the_branches_of_a_guider_are_calls_where_plain_pipelines_make_one_batch(tmp_path):
    """From configs alone: the folder has no weights."""
    pipe = tiny_ltx_pipeline()
    index = {"_class_name": "LTXModularPipeline", "_blocks_class_name": "LTXAutoBlocks"}
    for name in ("transformer", "vae"):
        getattr(pipe, name).save_config(tmp_path / name)
        index[name] = ["diffusers", type(getattr(pipe, name)).__name__, {"subfolder": name}]
    (tmp_path / INDEX).write_text(json.dumps(index))
    sizes = ["--height", "32", "--width", "64", "--frames", "5", "--quality", "balanced"]
    content = command("explain", "--model", str(tmp_path), *sizes, "--json").json()
    assert content["transformer_class"] == "LTXVideoTransformer3DModel"
    assert content["branches"] == 2
    assert content["settings"]["guidance_scale"] == 3.0
    assert content["tokens"] == 3 * 4 * 8


def test_weights_that_do_not_fit_or_are_not_there(generate, modular_folder, workdir, tmp_path):
    broken = shutil.copytree(modular_folder, tmp_path / "broken" / "tiny-flux")
    change_json(broken / "transformer/config.json", num_layers=9)
    assert "does not fit the weights beside it" in generate("-o", "o.png", model=broken).sentence()
    (broken / "transformer/diffusion_pytorch_model.safetensors").unlink()
    assert "the transformer of the model" in generate("-o", "o.png", model=broken).sentence()


def test_an_error_in_the_loop_is_a_sentence(generate, modular_folder, workdir, monkeypatch, capfd):
    def refuse(*_, **__):
        raise BudgetError("there is no room for anything")

    monkeypatch.setattr(SparseSession, "begin", refuse)
    ran = generate("-o", "out.png", model=modular_folder)
    assert "there is no room for anything" in ran.sentence()
    assert "Error in block" not in ran.stderr + capfd.readouterr().err
    assert list(workdir.iterdir()) == []


def test_a_guidance_scale_is_given_to_the_guiders():
    family = FAMILIES["qwen-image"]
    pipe = family.modular()
    known = {name: value for name, value in family.call.items() if name != "true_cfg_scale"}
    inputs = []
    ends = []
    hook = pipe.transformer.register_forward_pre_hook(
        lambda _, arguments, named: inputs.append(named["hidden_states"].shape),
        with_kwargs=True,
    )
    for scale, calls in ((3.0, 2), (1.0, 1)):
        inputs.clear()
        call_pipeline(
            pipe,
            {**known, "guidance_scale": scale, "num_inference_steps": 4},
            generator=torch.Generator().manual_seed(0),
            output_type="np",
            on_step_end=lambda step, latents: ends.append((step, latents.shape)) or step == 2,
        )
        assert len(inputs) == 3 * calls  # it is ended before the fourth
    # The latents are packed into tokens.
    assert ends == [(step, inputs[0]) for step in (0, 1, 2, 0, 1, 2)]
    assert "step" not in vars(pipe.scheduler)
    hook.remove()
