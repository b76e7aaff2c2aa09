"""Ways x prompts x seeds on a pipeline that makes up its clips."""

import json
import math
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest

from chipsparse.common.errors import UserError
from chipsparse.config import SparsityConfig
from chipsparse.experiments import rivals
from chipsparse.experiments.clips import Generation
from chipsparse.experiments.engine import Applied, Experiment, Way, plainly, sparse_way
from chipsparse.experiments.lpips import Lpips
from chipsparse.experiments.progress import Progress
from chipsparse.experiments.records import StepResult
from chipsparse.experiments.samples import Sample
from chipsparse.experiments.store import Store

SAMPLES = [Sample(n, f"prompt {n}", 10 + n) for n in range(3)]
NO_LPIPS = Lpips(None, "not here")


class Maker:
    """Clips whose pixels follow from the seed, each way brighter by its own number."""

    steps = 4
    progress = Progress()

    def __init__(self, stop=None):
        self.pipe = SimpleNamespace(brighter=0)
        self.made = []
        self.stop = stop

    def make(self, prompt, *, seed, title, report=None, way=None, work="", step_costs=()):
        if len(self.made) == self.stop:
            raise KeyboardInterrupt
        self.made.append((title.rpartition(", ")[2], seed))
        frames = np.random.default_rng(seed).integers(0, 200, (3, 16, 16, 3), np.uint8)
        seconds = 8.0 / (1 + self.pipe.brighter)
        steps = [StepResult(step=n, action="dense", seconds=seconds / 4) for n in range(4)]
        frames = frames + np.uint8(self.pipe.brighter)
        return Generation(frames, steps, seconds, seconds + 1, None, 0, 0, {}, [], [], [])


def way(name, brighter, **fields):
    @contextmanager
    def apply(pipe):
        pipe.brighter = brighter
        yield Applied(notes=lambda: [f"note of {name}"], facts=lambda made: {"n": brighter})
        pipe.brighter = 0

    return Way(name, apply, **fields)


A = way("A", 1)
B = way("B", 3)


def broken(pipe):
    raise ValueError("no such block\nat all")


def experiment(maker, store=None, **fields):
    return Experiment(maker, SAMPLES, store or Store(), lpips=lambda *_: NO_LPIPS, **fields)


def run(ways=(A, B), stop=None, store=None, **fields):
    maker = Maker(stop)
    return maker, list(experiment(maker, store, **fields).run(ways))


def test_clips_are_paired_by_seed_and_measured_against_dense():
    written = []
    store = Store()

    def write(way, sample, frames):  # before the record is kept
        assert f"{way.name}, {sample.name}" not in store.measured
        written.append((way.name, sample.seed))
        assert frames.shape == (3, 16, 16, 3)

    maker, clips = run(per_frame=True, store=store, write=write)
    # Another way goes first for each prompt.
    assert [name.removesuffix("ense") for name, _ in maker.made] == [*"dAB", *"dBA", *"dAB"]
    assert [seed for _, seed in maker.made] == [10] * 3 + [11] * 3 + [12] * 3
    assert maker.made == written == [(clip.way.name, clip.record.seed) for clip in clips]
    dense, a, b = (clip.record for clip in clips[:3])
    assert (dense.identical, dense.psnr_db, dense.ssim, dense.speedup) == (True, None, 1.0, 1.0)
    assert a.psnr_db == pytest.approx(20 * math.log10(255))
    assert b.psnr_db == pytest.approx(20 * math.log10(255 / 3))
    assert (a.seconds, a.total_seconds, a.speedup, b.speedup) == (4.0, 5.0, 2.0, 4.0)
    assert (b.largest_difference, b.flicker_change) == (3, pytest.approx(0.0, abs=1e-9))
    assert a.per_frame["psnr_db"] == pytest.approx([a.psnr_db] * 3)
    assert a.per_frame["flicker"] == [None, a.flicker, None]
    assert a.per_frame["flicker_dense"] == [None, dense.flicker, None]
    assert (a.lpips, a.lpips_missing, a.prompt) == (None, "not here", "prompt 0")
    assert (a.notes, a.facts, a.actions) == (["note of A"], {"n": 1}, ["dense"] * 4)


def test_what_is_kept_is_not_made_again_and_an_interrupt_loses_nothing(tmp_path):
    path = tmp_path / "kept" / "measured.json"
    with pytest.raises(KeyboardInterrupt):
        run(stop=4, store=Store(path, {"steps": 4}))
    first = json.loads(path.read_text())["measured"]
    assert len(first) == 4
    maker, clips = run(store=Store(path, {"steps": 4}))
    assert (len(maker.made), len(clips)) == (5, 9)
    assert first.items() <= json.loads(path.read_text())["measured"].items()
    again, kept = run(store=Store(path, {"steps": 4}))
    assert again.made == []
    assert [clip.record for clip in kept] == [clip.record for clip in clips]
    # Another way, a changed one, needs the dense clips, which are made again where they are gone.
    changed, more = run([way("A", 5, key="A, changed")], store=Store(path, {"steps": 4}))
    assert [name for name, _ in changed.made] == ["A"] * 3
    for file in path.with_name("measured-dense").iterdir():
        file.unlink()
    maker, gone = run([way("A", 5, key="A, anew")], store=Store(path, {"steps": 4}))
    assert maker.made[:2] == [("A", 10), ("dense", 10)]
    assert [clip.record for clip in gone] == [clip.record for clip in more]
    assert len(list(path.with_name("measured-dense").iterdir())) == 3


@pytest.mark.parametrize(
    "changes",
    [{"cuda_graphs": "never"}, {"memory.vram": "1G"}, {"schedule.spread.full": 0.5}],
    ids=lambda changes: next(iter(changes)),
)
def test_a_clip_of_another_config_is_another_clip(changes):
    """Its time is kept with it, and depends on fields that change nothing of what is computed."""
    config = SparsityConfig()
    assert sparse_way("A", config).key == sparse_way("A", config.override({})).key
    assert sparse_way("A", config).key != sparse_way("A", config.override(changes)).key


def test_a_refused_way_is_a_record_passed_over_and_tried_again(tmp_path):
    path = tmp_path / "measured.json"
    bad = Way("bad", broken)
    _, clips = run([bad, A], store=Store(path), describe=plainly)
    refused = [clip.record for clip in clips if clip.way is bad]
    assert [record.refused for record in refused] == ["ValueError: no such block"]
    assert sum(clip.way is A for clip in clips) == 3
    again = experiment(Maker(), Store(path), describe=plainly)
    assert again.plan([bad, A]) == 3
    maker, clips = run([way("bad", 2), A], store=Store(path), describe=plainly)
    assert maker.made == [("bad", sample.seed) for sample in SAMPLES]
    assert [clip.record.refused for clip in clips] == [None] * 9


@pytest.mark.parametrize("fields", [{"dense": Way("dense", broken), "describe": plainly}, {}])
def test_errors_of_dense_and_of_trials_are_raised(fields):
    with pytest.raises(ValueError, match="no such block"):
        run([Way("bad", broken)], **fields)


@pytest.mark.parametrize(
    ("stamp", "why"),
    [
        (None, "m.json is not a results file: it is no JSON"),
        ({"kind": "tuning"}, "is of kind tuning and format 3, not clips and 3; name another file"),
        ({"about": {"steps": 5}}, "was measured with steps 5, not 4; name another file"),
    ],
)
def test_files_of_something_else_are_refused_and_stay(tmp_path, stamp, why):
    path = tmp_path / "m.json"
    usual = {"kind": "clips", "format": 3, "about": {}, "measured": {}}
    text = "{" if stamp is None else json.dumps({**usual, **stamp})
    path.write_text(text)
    with pytest.raises(UserError, match=why):
        Store(path, {"steps": 4})
    assert path.read_text() == text


def test_a_file_that_cannot_be_written_keeps_what_it_had(tmp_path, monkeypatch):
    path = tmp_path / "m.json"
    store = Store(path)
    store.keep("a", lambda: 1.0)
    store.note("chosen", "x")
    before = path.read_bytes()
    with pytest.raises(ValueError, match="Out of range float"):
        store.keep("b", lambda: math.inf)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_text", full)
    with pytest.raises(UserError, match=r"m\.json could not be written: No space left on device"):
        store.keep("b", lambda: 2.0)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["m.json"]
    kept = Store(path)
    assert (kept.measured, kept.notes) == ({"a": 1.0}, {"chosen": "x"})


def test_the_floor_is_refused_where_no_kernel_can_be_exchanged(monkeypatch):
    @contextmanager
    def other(transformers):
        yield lambda: None

    monkeypatch.setattr(rivals, "other_attention", other)
    monkeypatch.setattr(rivals, "transformers_of", lambda pipe: [])
    _, clips = run([rivals.floor()], describe=plainly)
    assert "does not go through PyTorch's scaled_dot_product" in clips[1].record.refused
