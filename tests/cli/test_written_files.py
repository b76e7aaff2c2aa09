"""What is written is checked before it takes its name, and a finished clip is never lost."""

import errno
import json
import os
import resource
import stat
import subprocess
from pathlib import Path

import imageio_ffmpeg
import numpy as np
import pytest
from PIL import Image

from chipsparse.cli.errors import UserError
from chipsparse.cli.media import write as media
from chipsparse.cli.media.read import read_clip
from tests.cli.conftest import names
from tests.tiny_models import PROMPT

SUFFIXES = tuple(media.WRITERS)
FACTS = {
    "prompt": "a cat = x; #1\nand \\ a dög",
    "negative_prompt": "blur",
    "steps": "4",
    "guidance_scale": "3.0",
    "seed": "5",
    "size": "48x32",
    "model": "tiny, wan",
    "chipsparse": "0.1.0",
}
TEXT = (
    "a cat = x; #1\nand \\ a dög\nNegative prompt: blur\n"
    'Steps: 4, CFG scale: 3.0, Seed: 5, Size: 48x32, Model: "tiny, wan", Version: chipsparse 0.1.0'
)


def noise(frames=5, height=32, width=48):
    """What no encoder makes small."""
    return np.random.default_rng(0).integers(0, 256, (frames, height, width, 3), dtype=np.uint8)


@pytest.fixture
def loses(workdir, temporary):
    """Fails to write a clip over an earlier file, and returns the sentence and the kept frames."""

    def run(name, frames, **options):
        Path(name).write_bytes(b"older")
        with pytest.raises(UserError) as failed:
            media.write_media({Path(name): frames}, fps=8, **options)
        assert Path(name).read_bytes() == b"older"
        assert names(workdir) == [name]
        (kept,) = temporary.iterdir()
        sentence, _, place = str(failed.value).rpartition("; ")
        assert place == f"all is kept as PNG in {kept}"
        return sentence, read_clip(kept / f"{Path(name).stem}.png").frames

    return run


@pytest.mark.parametrize("suffix", [".mp4", ".webm", ".gif"])
def test_a_limit_on_the_size_of_files(loses, suffix):
    """As `ulimit -f`: the real limit, so that ffmpeg is ended by its signal."""
    frames, limits = noise(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8_000, limits[1]))
    try:
        sentence, kept = loses(f"out{suffix}", frames)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert sentence == f"out{suffix} could not be written: File too large"
    np.testing.assert_array_equal(kept, frames)


@pytest.fixture
def stand_in(tmp_path_factory, monkeypatch):
    """Puts a script in place of ffmpeg."""

    def make(text):
        script = tmp_path_factory.mktemp("bin") / "ffmpeg"
        script.write_text(f"#!/bin/sh\nfor out; do :; done\n{text}\n")
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setattr(imageio_ffmpeg, "get_ffmpeg_exe", lambda: str(script))

    return make


FULL = "[out#0/mp4 @ 0x5] Error muxing a packet: No space left on device"


@pytest.mark.parametrize(
    ("script", "sentence"),
    [
        (f'cat > /dev/null; echo half > "$out"; echo "{FULL}" >&2; exit 228', "No space left on"),
        (f'echo half > "$out"; echo "{FULL}" >&2; exit 228', "No space left on device"),
        ('cat > /dev/null; echo "[a @ 0x1] Unknown encoder" >&2; exit 8', "ffmpeg ended with exit"),
        ("kill -9 $$", "ffmpeg ended with signal 9"),
        ("cat > /dev/null; exit 0", "ffmpeg finds no frame in the file that it wrote"),
    ],
)
def test_an_encoder_that_fails(loses, stand_in, script, sentence):
    stand_in(script)
    said, kept = loses("out.mp4", noise())
    assert said.startswith(f"out.mp4 could not be written: {sentence}")
    np.testing.assert_array_equal(kept, noise())


@pytest.mark.parametrize("suffix", [".mp4", ".webm"])
def test_a_video_with_too_few_frames(loses, stand_in, suffix):
    """An encoder that says that all is well, and leaves some out."""
    real = imageio_ffmpeg.get_ffmpeg_exe()
    size = 3 * 32 * 48 * 3
    stand_in(
        f'case "$*" in *rawvideo*) head -c {size} | {real} "$@";; *) {real} "$@";; esac || exit 1'
    )
    said, _ = loses(f"out{suffix}", noise())
    assert "of 5 frames of 48x32 pixels, the file that ffmpeg wrote has 3 of 48x32" in said


@pytest.mark.parametrize("suffix", [".gif", ".png"])
def test_a_picture_that_reads_back_as_another_one(loses, monkeypatch, suffix):
    save = Image.Image.save

    def other(image, file, **options):
        if Path(file).parent.name.startswith(".chipsparse-"):
            image = image.rotate(180)
            options |= {"duration": 10} if "duration" in options else {}
        save(image, file, **options)

    monkeypatch.setattr(Image.Image, "save", other)
    said, _ = loses(f"out{suffix}", noise(1 if suffix == ".png" else 5))
    assert said.startswith(f"out{suffix} could not be written: ")


def test_where_no_temporary_folder_takes_it_the_cache_does(workdir, monkeypatch, stand_in):
    (workdir / "full").touch()
    monkeypatch.setattr(media.tempfile, "gettempdir", lambda: str(workdir / "full"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(workdir / "cache"))
    stand_in("exit 1")
    with pytest.raises(UserError, match=r"all is kept as PNG in .*/cache/chipsparse/chipsparse-k"):
        media.write_media({workdir / "out.mp4": noise(1)}, fps=8, metadata=FACTS)
    (kept,) = (workdir / "cache" / "chipsparse").iterdir()
    with Image.open(kept / "out.png") as image:
        assert image.info["parameters"] == TEXT


def test_where_there_is_room_nowhere_nothing_is_left(workdir, temporary, monkeypatch, stand_in):
    monkeypatch.setenv("XDG_CACHE_HOME", str(workdir / "cache"))
    stand_in("exit 1")

    def full(path, *_, **__):
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(media, "write_pngs", full)
    with pytest.raises(UserError, match=r"ffmpeg ended with exit code 1; nothing could be kept"):
        media.write_media({workdir / "out.mp4": noise(1)}, fps=8)
    assert names(temporary) == names(workdir / "cache" / "chipsparse") == []


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system")
def test_a_full_file_system(workdir, temporary):
    small = workdir / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(small)])
    if mounted.returncode:
        pytest.skip("mounting is not allowed here")
    try:
        for suffix in SUFFIXES:
            with pytest.raises(UserError, match="could not be written: No space left on device"):
                media.write_media({small / f"out{suffix}": noise(24, 64, 64)}, fps=8)
            assert names(small) == []
    finally:
        subprocess.run(["umount", str(small)], check=True)


# Numbered frames.


def test_frames_of_an_earlier_run_do_not_mix_with_new_ones(workdir):
    for count in (9, 5, 1, 3):
        media.write_media({Path("a.png"): noise(count)}, fps=8)
        files = ["a.png"] if count == 1 else [f"a-00{index}.png" for index in range(count)]
        assert names(workdir) == files
        np.testing.assert_array_equal(read_clip(Path("a.png")).frames, noise(count))


def test_pictures_of_others_stay(workdir):
    media.write_media({Path("b.png"): noise(2), Path("a-dense.png"): noise(3)}, fps=8)
    Image.fromarray(noise(1)[0]).save("a-007.png")
    media.write_media({Path("a-006.png"): noise(1)}, fps=8)  # one of its own, by chipsparse
    Path("a-008.png").write_text("no picture")
    before = names(workdir)
    for count in (3, 1, 2):
        media.write_media({Path("a.png"): noise(count)}, fps=8)
        assert set(before) < set(names(workdir))
        np.testing.assert_array_equal(read_clip(Path("a.png")).frames, noise(count))
    assert set(names(workdir)) - set(before) == {"a-000.png", "a-001.png"}


def test_a_clip_with_a_frame_that_is_gone(workdir):
    media.write_media({Path("a.png"): noise(3)}, fps=8)
    Path("a-001.png").unlink()
    with pytest.raises(UserError, match=r"a\.png has 2 of its 3 frames; the others are missing"):
        read_clip(Path("a.png"))


def test_a_failure_brings_the_frames_of_an_earlier_run_back(workdir, temporary, monkeypatch):
    media.write_media({Path("a.png"): noise(4)}, fps=8)
    before = {path.name: path.read_bytes() for path in workdir.iterdir()}
    (workdir / "b.png").mkdir()
    clips = {Path("a.png"): noise(2, height=16), Path("b.png"): noise(1)}
    with pytest.raises(UserError, match=r"b\.png is a folder"):
        media.write_media(clips, fps=8)
    (workdir / "b.png").rmdir()
    assert {path.name: path.read_bytes() for path in workdir.iterdir()} == before


# Metadata.


def read_by_ffmpeg(path):
    """The tags of a video, as ffmpeg reads them."""
    text = subprocess.run(
        [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-i", path, "-f", "ffmetadata", "-"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.lower()
    return text.replace("\\\n", "\n").replace("\\=", "=").replace("\\;", ";").replace("\\#", "#")


def test_what_the_files_say_of_themselves(workdir):
    media.write_media({Path(f"a{suffix}"): noise(1) for suffix in SUFFIXES}, fps=8, metadata=FACTS)
    with Image.open("a.png") as image:
        assert image.info["parameters"] == TEXT
        assert json.loads(image.info["chipsparse"]) == FACTS
    with Image.open("a.gif") as image:
        assert image.info["comment"].decode() == TEXT
    for suffix in (".mp4", ".webm"):
        tags = read_by_ffmpeg(f"a{suffix}")
        assert "comment=a cat = x; #1\nand \\\\ a dög\nnegative prompt: blur\nsteps: 4" in tags
        assert 'description={"prompt": "a cat = x; #1' in tags


def test_a_prompt_may_be_longer_than_a_command_line(workdir):
    long = {"prompt": "a very long prompt " * 20_000}
    media.write_media({Path(f"a{suffix}"): noise(1) for suffix in SUFFIXES}, fps=8, metadata=long)
    assert long["prompt"].strip() in read_by_ffmpeg("a.webm")


def test_no_folder_is_named(generate, model_folder, workdir):
    generate("-o", "o.png", "--frames", "1", "--negative-prompt", "blue", "--seed", "7").fine()
    with Image.open("o.png") as image:
        facts = json.loads(image.info["chipsparse"])
        assert str(model_folder.parent) not in str(image.info)
    version = facts.pop("chipsparse")
    assert facts == {
        "prompt": PROMPT,
        "negative_prompt": "blue",
        "steps": "4",
        "guidance_scale": "3.0",
        "seed": "7",
        "size": "48x32",
        "frames": "1",
        "model": model_folder.name,
        "dtype": "float32",
        "mode": "sparse",
        "profile": "chipsparse.yaml",
    }
    assert version.startswith("0.")


# Videos.


def test_a_larger_crf_makes_a_smaller_file(workdir):
    frames = noise(8, 64, 64)
    for suffix, most in ((".mp4", 51), (".webm", 63)):
        sizes = []
        for crf in (0, None, most):
            media.write_media({Path(f"a{suffix}"): frames}, fps=8, crf=crf)
            sizes.append(Path(f"a{suffix}").stat().st_size)
        assert sizes == sorted(sizes, reverse=True)
        assert len(set(sizes)) == 3


def test_a_video_that_ends_too_soon_is_not_read(workdir):
    for suffix in (".mp4", ".webm"):
        media.write_media({Path(f"a{suffix}"): noise(9)}, fps=8)
        content = Path(f"a{suffix}").read_bytes()
        Path(f"cut{suffix}").write_bytes(content[: len(content) * 3 // 4])
        with pytest.raises(UserError, match=f"cut{suffix} could not be read: "):
            read_clip(Path(f"cut{suffix}"))


def test_ffmpeg_is_gone_after_an_interruption(workdir, stand_in, monkeypatch):
    """It has a session of its own, so that Ctrl-C on a terminal is for chipsparse alone."""
    stand_in(f'echo $$ > "{workdir}/pid"; exec sleep 60')
    communicate = subprocess.Popen.communicate

    def interrupted(process, *_, **__):
        while not (Path("pid").exists() and Path("pid").read_text().strip()):
            pass
        assert os.getsid(process.pid) == process.pid
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "communicate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        media.write_media({Path("a.mp4"): noise(1)}, fps=8)
    monkeypatch.setattr(subprocess.Popen, "communicate", communicate)
    with pytest.raises(ProcessLookupError):
        os.kill(int(Path("pid").read_text()), 0)
    assert names(workdir) == ["pid"]
