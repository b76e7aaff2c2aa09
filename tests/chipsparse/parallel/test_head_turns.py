"""Tokens for heads and back between real processes, against the whole tensors."""

import contextlib
import tempfile
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from chipsparse.parallel import head_exchange, windows
from chipsparse.parallel.head_exchange import HeadExchange, SharingGroup
from chipsparse.parallel.head_turns import HeadTurns
from chipsparse.parallel.peers import Peers
from chipsparse.parallel.sequence_cut import SequenceCut
from tests.ranks import run_ranks

# By number of ranks: cuts, with heads, samples and channels. Windows grow, and shrink to a part.
CASES = {
    2: [
        (SequenceCut((40, 33), (0, 7)), 6, 1, 64),
        (SequenceCut((300, 211), (5, 0)), 5, 2, 32),
        (SequenceCut((60, 30), (0, 1), ring=2), 4, 1, 64),
        (SequenceCut((40, 33), (0, 7)), 6, 1, 64),
    ],
    3: [(SequenceCut((9, 20, 13), (0, 0, 2)), 4, 1, 16)],
    4: [(SequenceCut((20, 7, 13, 9), (2, 0, 0, 0), ring=2), 7, 2, 24)],
}
LAYERS = 6


class SharedFiles:
    """Symmetric memory for processes without GPUs: files that all of them map."""

    def __init__(self, file=None):
        self._file = file

    def empty(self, nbytes, *, dtype, device):
        file = tempfile.NamedTemporaryFile(delete=False)  # noqa: SIM115
        buffer = torch.from_file(file.name, shared=True, size=nbytes, dtype=dtype)
        buffer.file = file.name
        return buffer

    def rendezvous(self, buffer, group):
        names = [None] * dist.get_world_size(group)
        dist.all_gather_object(names, buffer.file, group=group)

        def get_buffer(rank, sizes, dtype):
            (numbers,) = sizes
            whole = torch.from_file(
                names[rank], shared=True, size=buffer.numel(), dtype=torch.uint8
            )
            return whole[: numbers * dtype.itemsize].view(dtype)

        return SimpleNamespace(
            get_buffer=get_buffer, barrier=lambda timeout_ms: dist.barrier(group=group)
        )


@contextlib.contextmanager
def files_for_memory():
    """As on GPUs that reach each other's memory, but all at once."""
    stream = mock.MagicMock()
    with (
        mock.patch.object(windows, "_symmetric_memory", SharedFiles),
        mock.patch.object(head_exchange, "gpus_reach", return_value=True),
        mock.patch.multiple(
            torch.cuda,
            synchronize=stream,
            current_stream=stream,
            Stream=stream,
            stream=lambda _: contextlib.nullcontext(),
        ),
    ):
        yield


def largest_errors(way):
    """By case, how far tokens and heads are from those of whole tensors; the way is taken."""
    with files_for_memory() if way == "files" else contextlib.nullcontext():
        device, group = torch.device("cpu"), dist.group.WORLD
        if way == "gpus":
            device = torch.device("cuda", dist.get_rank())
            torch.cuda.set_device(device)
            group = dist.new_group(backend="nccl")
        exchanges = {}
        errors = []
        for cut, heads, batch, width in CASES[dist.get_world_size()]:
            if cut.ring not in exchanges:
                peers = Peers(range(dist.get_world_size()))
                exchanges[cut.ring] = HeadExchange(SharingGroup(group, cut.ring), peers)
            exchange = exchanges[cut.ring]
            found = [
                one_layer(exchange, cut, (batch, sum(cut.tokens), heads, width), layer, device)
                for layer in range(LAYERS)
            ]
            errors.append(max(found))
            assert exchange._reached == (way != "collectives")
    return errors


def one_layer(exchange, cut, size, layer, device):
    """Heads are turned into others that tell token, head and layer, part by part or all at once."""
    generator = torch.Generator().manual_seed(layer)
    whole = [torch.randn(size, generator=generator).to(device) for _ in range(3)]
    tokens = slice(sum(cut.tokens[: exchange.rank]), sum(cut.tokens[: exchange.rank + 1]))
    turns = HeadTurns(exchange, tuple(state[:, tokens] for state in whole), cut)
    place, run = exchange.rank % cut.ulysses, exchange.rank // cut.ulysses
    heads = torch.arange(size[2]).tensor_split(cut.ulysses)[place].to(device)
    rows = slice(sum(cut.query_rows[:run]), sum(cut.query_rows[: run + 1]))
    expected = [state.transpose(1, 2)[:, heads] for state in whole]
    expected[0] = expected[0][:, :, rows]

    def compute(part):
        states = [state[:, part] for state in (turns.query, turns.key, turns.value)]
        found.append(max(map(distance, states, (state[:, part] for state in expected))))
        if device.type == "cuda":
            torch.cuda._sleep(200_000 * (exchange.rank + 1))  # processes are not equally fast
        return states[0] * (heads[part] + 1)[None, :, None, None] + states[1].mean(2, keepdim=True)

    found = []
    if layer % 2 == 0:
        output = turns.attend(compute)
    else:
        turns.receive()
        output = compute(slice(0, len(heads)))
    output = turns.finish(output)
    factor = torch.arange(1, size[2] + 1, device=device)[:, None]
    whole_output = whole[0] * factor + whole[1].mean(1, keepdim=True)
    return max(*found, distance(output, whole_output[:, tokens].transpose(1, 2)), 0.0)


def distance(one, other):
    return float((one - other).abs().max())


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow), 4])
def test_each_process_gets_its_heads_and_gives_back_their_output(ranks, tmp_path, monkeypatch):
    for way in ("collectives", "files"):
        folder = tmp_path / way
        folder.mkdir()
        monkeypatch.setenv("TMPDIR", str(folder))
        for ended in run_ranks(ranks, f"{__name__}:largest_errors", way, folder=folder):
            assert max(ended.result) < 1e-5, (way, ended.result)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_gpus_write_to_each_other(tmp_path):
    for ended in run_ranks(2, f"{__name__}:largest_errors", "gpus", folder=tmp_path):
        assert max(ended.result) < 1e-5, ended.result
