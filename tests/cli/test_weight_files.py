"""Weights that are missing, damaged or of another config are refused; their digest tells which."""

import dataclasses
import json
import os

import numpy as np
import pytest
from safetensors.numpy import save_file

from chipsparse.cli.errors import UserError
from chipsparse.cli.model.description import describe_model
from chipsparse.cli.model.weights import check_weight_files, files_digest, weights_digest


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


# Which ones they are.


def digest(folder):
    return weights_digest(describe_model(str(folder)))


def flip(file, position):
    """Changes a byte, and neither size nor time."""
    times = file.stat()
    with file.open("r+b") as stream:
        stream.seek(position)
        (byte,) = stream.read(1)
        stream.seek(position)
        stream.write(bytes([byte ^ 1]))
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


def begin(file):
    """Where the first tensor of a safetensors file begins."""
    return 8 + int.from_bytes(file.read_bytes()[:8], "little")


@pytest.fixture
def tensors(tmp_path):
    """A safetensors file of two large tensors."""
    file = tmp_path / "a.safetensors"
    save_file({name: np.zeros(200_000, np.uint8) for name in "ab"}, file)
    return file


@pytest.mark.parametrize("place", [0, 199_999, 200_000, 399_999])
def test_both_ends_of_every_tensor_count(tensors, place):
    before = files_digest({"": tensors})
    flip(tensors, begin(tensors) + place)
    assert files_digest({"": tensors}) != before


def test_the_header_counts(tmp_path):
    found = set()
    for name in "ab":
        save_file({name: np.zeros(9, np.uint8)}, tmp_path / "a.safetensors")
        found.add(files_digest({"": tmp_path / "a.safetensors"}))
    assert len(found) == 2


def test_large_tensors_are_not_read_whole(tensors):
    before = files_digest({"": tensors})
    flip(tensors, begin(tensors) + 100_000)
    assert files_digest({"": tensors}) == before


@pytest.mark.parametrize(
    "header",
    [
        {"a": {"data_offsets": [0, 300_000]}},  # less than there is
        {"a": {"data_offsets": [0, 400_001]}},
        {"a": {"data_offsets": [200_000, 400_000]}},
        {"a": {"data_offsets": [0.0, 400_000.0]}},
        {"a": {"data_offsets": [400_000]}},
        {"a": {"data_offsets": None}},
        {"a": {}},
        {"a": 3},
        ["a"],
        b"no JSON",
        b"[" * 100_000,
    ],
)
def test_what_is_no_safetensors_file_is_read_whole(tmp_path, header):
    file = tmp_path / "a.safetensors"
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(400_000))
    before = files_digest({"": file})
    flip(file, file.stat().st_size - 100_000)
    assert files_digest({"": file}) != before


@pytest.mark.parametrize("name", ["a.bin", "a.gguf", "a.safetensors"])
def test_other_files_are_read_whole(tmp_path, name):
    file = tmp_path / name
    file.write_bytes(b"\xff" * 3_000_000)  # of a safetensors file, a header without end
    before = files_digest({"": file})
    flip(file, 1_500_000)
    assert files_digest({"": file}) != before


@pytest.mark.parametrize(
    "name",
    [
        "model_index.json",
        "scheduler/scheduler_config.json",
        "transformer/config.json",
        "vae/config.json",
        "tokenizer/tokenizer_config.json",
        "tokenizer/added.model",
    ],
)
def test_configs_and_tokenizers_count(broken_model, name):
    before = digest(broken_model)
    with (broken_model / name).open("a") as file:
        file.write(" ")
    assert digest(broken_model) != before


def test_the_same_content_in_another_folder(model_folder, broken_model):
    for file in broken_model.rglob("*"):
        os.utime(file, (0, 0))
    (broken_model / "chipsparse.yaml").unlink()  # whose settings count by themselves
    (broken_model / "README.md").write_text("tiny")
    (broken_model / "transformer/.DS_Store").write_text("seen")
    assert digest(broken_model) == digest(model_folder)
    blobs = broken_model.rename(broken_model.with_name("blobs"))  # as in the cache of a hub
    for file in list(blobs.rglob("*")):
        place = broken_model / file.relative_to(blobs)
        if file.is_file():
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to(file)
    assert digest(broken_model) == digest(model_folder)


def test_a_model_of_a_hub_is_told_by_its_name(model_folder, workdir):
    model = dataclasses.replace(describe_model(str(model_folder)), location="owner/tiny")
    assert weights_digest(model) is None


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(UserError, match=r"a\.bin cannot be read: No such file"):
        files_digest({"": tmp_path / "a.bin"})
