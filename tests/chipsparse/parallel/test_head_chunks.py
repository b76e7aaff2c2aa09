"""Tokens for heads and back between real processes, against the whole tensors."""

import contextlib
import tempfile
import time
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from chipsparse.common.machine import is_stuck
from chipsparse.parallel import head_exchange, windows
from chipsparse.parallel.head_chunks import HeadChunks
from chipsparse.parallel.head_exchange import HeadExchange
from chipsparse.parallel.peers import PeerError, Peers
from chipsparse.parallel.sequence_cut import SequenceCut
from tests.ranks import run_ranks

# By number of ranks: cuts, with heads, samples and channels. Windows grow, and shrink to a part.
CASES = {
    2: [
        (SequenceCut((40, 33), (0, 7)), 6, 1, 64),
        (SequenceCut((300, 211), (5, 0)), 5, 2, 32),
        (SequenceCut((40, 33), (0, 7)), 6, 1, 64),
    ],
    3: [(SequenceCut((9, 20, 13), (0, 0, 2)), 4, 1, 16)],
    4: [(SequenceCut((20, 7, 13, 9), (2, 0, 0, 0)), 7, 2, 24)],
}
LAYERS = 6


class SharedFiles:
    """Symmetric memory for processes without GPUs: files that all of them map."""

    def empty_strided_p2p(self, size, _stride, dtype, _device):
        file = tempfile.NamedTemporaryFile(delete=False)  # noqa: SIM115
        buffer = torch.from_file(file.name, shared=True, size=size[0], dtype=dtype)
        buffer.file = file.name
        return buffer

    def rendezvous(self, buffer, _group_name):
        names = [None] * dist.get_world_size()
        dist.all_gather_object(names, buffer.file)

        def get_buffer(rank, sizes, dtype):
            (numbers,) = sizes
            file = torch.from_file(names[rank], shared=True, size=buffer.numel(), dtype=torch.uint8)
            return file[: numbers * dtype.itemsize].view(dtype)

        return SimpleNamespace(get_buffer=get_buffer, barrier=lambda timeout_ms: dist.barrier())


@contextlib.contextmanager
def files_for_memory():
    """As on GPUs that reach each other's memory, but all at once."""
    stream = mock.MagicMock()
    replaced = dict.fromkeys(("synchronize", "empty_cache", "current_stream", "Stream"), stream)
    with (
        mock.patch.object(windows, "_symmetric_memory", SharedFiles),
        mock.patch.object(head_exchange, "gpus_reach", return_value=True),
        mock.patch.multiple(torch.cuda, **replaced, stream=lambda _: contextlib.nullcontext()),
    ):
        yield


def largest_errors(way):
    """By case, how far tokens and heads are from those of whole tensors; the way is taken."""
    with files_for_memory() if way == "files" else contextlib.nullcontext():
        group, device = (dist.group.WORLD, torch.device("cpu")) if way != "gpus" else gpu_group()
        ranks = dist.get_world_size()
        exchange = HeadExchange(group, Peers(range(ranks)))
        errors = []
        for cut, heads, batch, width in CASES[ranks]:
            found = [
                one_layer(exchange, cut, (batch, sum(cut.tokens), heads, width), layer, device)
                for layer in range(LAYERS)
            ]
            errors.append(max(found))
            assert exchange._reached == (way != "collectives")
    return errors


def gpu_group():
    device = torch.device("cuda", dist.get_rank())
    torch.cuda.set_device(device)
    return dist.new_group(backend="nccl"), device


def broken_off():
    """Rank 1 fails behind the first layer; rank 0 goes on to the next, and then asks."""
    group, device = gpu_group()
    exchange = HeadExchange(group, Peers(range(2), timeout_s=20))
    cut = SequenceCut((40, 33), (0, 0))
    one_layer(exchange, cut, (1, 73, 6, 64), 0, device)
    if exchange.rank == 1:
        exchange.peers.failed(ArithmeticError("no sum today"))
        return None
    HeadChunks(exchange, (torch.zeros(1, 40, 6, 64, device=device),) * 3, cut).receive()
    try:
        exchange.peers.gather("the next step")
    except PeerError as error:
        assert is_stuck(device, seconds=2)
        exchange.close(stuck=True)
        return str(error)
    return None


def one_layer(exchange, cut, size, layer, device):
    """Heads are turned into others that tell token, head and layer, part by part or all at once."""
    generator = torch.Generator().manual_seed(layer)
    whole = [torch.randn(size, generator=generator).to(device) for _ in range(3)]
    tokens = slice(sum(cut.tokens[: exchange.rank]), sum(cut.tokens[: exchange.rank + 1]))
    chunks = HeadChunks(exchange, tuple(state[:, tokens] for state in whole), cut)
    heads = torch.arange(size[2]).tensor_split(exchange.ranks)[exchange.rank].to(device)
    expected = [state.transpose(1, 2)[:, heads] for state in whole]

    def compute(part):
        states = [state[:, part] for state in (chunks.query, chunks.key, chunks.value)]
        found.append(max(map(distance, states, (state[:, part] for state in expected))))
        if device.type == "cuda":
            torch.cuda._sleep(200_000 * (exchange.rank + 1))  # processes are not equally fast
        return states[0] * (heads[part] + 1)[None, :, None, None] + states[1].mean(2, keepdim=True)

    found = []
    if (layer + exchange.rank) % 2 == 0:
        output = chunks.attend(compute)
    else:
        chunks.receive()
        output = compute(slice(0, len(heads)))
    output = chunks.finish(output)
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


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_process_ends_although_its_gpu_waits_for_one_that_failed(tmp_path):
    start = time.monotonic()
    first, _ = run_ranks(2, f"{__name__}:broken_off", folder=tmp_path)
    assert first.result == "rank 1 failed: ArithmeticError: no sum today"
    assert time.monotonic() - start < windows.TIMEOUT_MS / 1e3 / 4


@pytest.mark.parametrize(
    ("numbers", "on_host", "reaches", "room", "expected"),
    [
        ([0, 1, 2], 3, True, True, True),
        ([0, 0, 0], 3, True, True, False),  # each process sees one GPU alone
        ([0, 1, None], 3, True, True, False),
        ([0, 1, 2], 2, True, True, False),
        ([0, 1, 2], 3, False, True, False),
        ([0, 1, 2], 3, True, False, False),
    ],
)
def test_memory_is_shared_where_all_gpus_reach_each_other(
    numbers,
    on_host,
    reaches,
    room,
    expected,
    monkeypatch,
):
    def buffers(*_, **__):
        if not room:
            raise RuntimeError("forbidden")

    least = mock.Mock(side_effect=lambda able: (able,))
    peers = SimpleNamespace(gather=lambda _: numbers, least=least, on_this_host=on_host)
    monkeypatch.setattr(windows, "_number", lambda _: 0)
    monkeypatch.setattr(windows, "_reaches", lambda own, other: reaches)
    monkeypatch.setattr(windows, "Windows", buffers)
    assert windows.gpus_reach(None, peers, torch.device("cuda")) is expected
    least.assert_called_with(expected)


def test_memory_of_a_cpu_and_of_gpus_that_must_not_be_reached_is_not_shared(monkeypatch):
    assert windows._number(torch.device("cpu")) is None
    memory = mock.Mock(get_backend=lambda _: "CUDA")
    monkeypatch.setattr(windows, "_symmetric_memory", lambda: memory)
    assert windows._number(torch.device("cuda", 1)) == 1
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    assert windows._number(torch.device("cuda", 1)) is None


def test_all_processes_hear_that_one_has_no_room(monkeypatch):
    memory = mock.Mock(empty_strided_p2p=mock.Mock(side_effect=RuntimeError("out of memory")))
    monkeypatch.setattr(windows, "_symmetric_memory", lambda: memory)
    for error, room in (("out of memory", 1), ("another process has no 64 bytes", 0)):
        peers = SimpleNamespace(least=lambda able, room=room: (min(able, room),))
        with pytest.raises(RuntimeError, match=error):
            windows.Windows(None, peers, 64, torch.device("cuda"), reached=True)
        memory.empty_strided_p2p.side_effect = None
    memory.rendezvous.assert_not_called()
