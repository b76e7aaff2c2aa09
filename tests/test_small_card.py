"""The benchmark of large models on small cards: a dry run at tiny size."""

import json

import pytest
import torch

from benchmarks import small_card
from benchmarks.__main__ import main


def dry_run(path, *arguments):
    small = ("--small", "--depth", "0.05", "--device", "cpu", "--dtype", "float32")
    code = main(["--op", "small_card", *small, "--json", str(path), *arguments])
    return code, json.loads(path.read_text()) if path.exists() else []


def test_a_record_for_each_card(tmp_path, monkeypatch):
    limits = []

    def limited_to(nbytes, device):
        limits.append(nbytes)
        return real(nbytes, device)

    real = small_card.limited_to
    monkeypatch.setattr(small_card, "limited_to", limited_to)
    code, found = dry_run(tmp_path / "records.json", "--case", "wan14b_480p", "--cards", "24,16")
    assert code == 0
    assert limits == [24e9, 16e9]
    assert [record["card_gb"] for record in found] == [24, 16]
    for record in found:
        assert (record["case"], record["layers"], record["sparse_layers"]) == ("wan14b_480p", 2, 2)
        assert record["residuals"] == "full"  # there is room
        assert record["fallbacks"] == record["notes"] == []
        assert record["speedup"] == pytest.approx(record["stock_ms"] / record["sparse_ms"])
        one = record["tokens"] * 128 * 4  # the residual of a layer and branch; others are small
        assert 2 * 2 * one < record["cache_bytes"] < 2 * 2 * one * 1.2
        assert (record["peak_gpu_bytes"], record["host_bytes"]) == (None, 0)


def test_weights_are_as_large_as_usual_and_offloaded_in_groups():
    cpu = torch.device("cpu")
    model = small_card.CASES["wan14b_480p"]
    made = small_card.offloaded(model, 0.05, True, cpu, torch.float32)
    hooks = [getattr(block, "_diffusers_hook", None) for block in made.blocks]
    assert all(hook.get_hook("group_offloading") is not None for hook in hooks)


def test_a_case_that_is_not_there_fails(tmp_path, capsys):
    code, found = dry_run(tmp_path / "records.json", "--case", "flux_1280x768")
    assert (code, found) == (1, [])
    assert "there are ['wan14b_480p', 'wan14b_720p']" in capsys.readouterr().out
