"""Weights that are missing, damaged or of another config are refused before any is loaded."""

import json

import pytest

from chipsparse.cli.errors import UserError
from chipsparse.cli.model.description import describe_model
from chipsparse.cli.model.weight_files import check_weight_files


def change_config(folder, **entries):
    path = folder / "transformer" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def weights(folder):
    (file,) = (folder / "transformer").glob("*.safetensors")
    return file


def check(folder):
    check_weight_files(describe_model(str(folder)), folder)


def test_a_sound_model(model_folder):
    check(model_folder)


@pytest.mark.parametrize(
    ("layers", "sentence"),
    [
        (2, r"does not fit the weights beside it: it has no place for \d+ tensors that are there"),
        (4, r"it asks for \d+ tensors more than are there, such as blocks\.3\."),
        (0, r"it has no place for \d+ tensors that are there, such as blocks\.0\."),
        (-1, "num_layers must be a whole number from 0 to 1000, got -1"),
        (1_000_000, "num_layers must be a whole number from 0 to 1000, got 1000000"),
        ("ten", "num_layers must be a whole number from 0 to 1000, got 'ten'"),
        (2.5, "num_layers must be a whole number from 0 to 1000, got 2.5"),
    ],
)
def test_another_number_of_layers(broken_model, layers, sentence):
    change_config(broken_model, num_layers=layers)
    with pytest.raises(UserError, match=sentence):
        check(broken_model)


def test_other_shapes(broken_model):
    change_config(broken_model, ffn_dim=96)
    with pytest.raises(UserError, match=r"asks for other shapes of \d+ tensors, such as blocks"):
        check(broken_model)


def test_a_config_that_makes_no_model(broken_model):
    change_config(broken_model, attention_head_dim="wide")
    with pytest.raises(UserError, match=r"config\.json makes no WanTransformer3DModel: "):
        check(broken_model)


def test_quantized_weights_have_other_tensors(broken_model):
    change_config(broken_model, num_layers=2, quantization_config={"quant_method": "other"})
    check(broken_model)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_a_download_that_broke_off(broken_model, keep):
    file = weights(broken_model)
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(UserError, match=r"safetensors is damaged \(incomplete download\?\)"):
        check(broken_model)


def test_a_pointer_of_git_lfs(broken_model):
    weights(broken_model).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(UserError, match=r"is damaged \(incomplete download\?\)"):
        check(broken_model)


def test_no_weights(broken_model):
    weights(broken_model).unlink()
    with pytest.raises(
        UserError, match=r"the transformer of the model .* has no weights: "
    ) as error:
        check(broken_model)
    assert ".bin" not in str(error.value)


def test_a_part_that_the_index_names(broken_model):
    index = weights(broken_model).with_name("diffusion_pytorch_model.safetensors.index.json")
    index.write_text(json.dumps({"weight_map": {"a": "part-2.safetensors"}}))
    with pytest.raises(UserError, match=r"has no part-2\.safetensors, which .*index\.json names"):
        check(broken_model)
    index.write_text("{}")
    with pytest.raises(UserError, match=r"index\.json is damaged"):
        check(broken_model)


def test_the_command_refuses_before_anything_is_made(generate, broken_model, workdir):
    change_config(broken_model, num_layers=2)
    assert "does not fit the weights beside it" in generate(model=broken_model).sentence()
    assert list(workdir.iterdir()) == []
