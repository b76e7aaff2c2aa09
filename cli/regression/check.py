"""The fixture `media_regression`: frames against golden files, sparse against dense."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import pytest
import torch

from chipsparse.api import enable
from chipsparse.cli.compare.clips import Source, compare
from chipsparse.cli.media.formats import DEFAULT_FPS
from chipsparse.cli.media.panels import difference_rows, stack_panels
from chipsparse.cli.media.read import read_frames
from chipsparse.cli.media.write import write_lossless, write_text
from chipsparse.cli.regression.outcomes import FAILURE, UPDATE, outcome_folder
from chipsparse.experiments.comparison import Bounds, ClipComparison
from chipsparse.experiments.frames import check_fit

if TYPE_CHECKING:
    from chipsparse.pipelines.call import Pipeline

NAME = re.compile(r"\w[\w.-]*")
PACKAGES = ("chipsparse", "torch", "diffusers", "transformers")
EXACT = Bounds(max_pixel=0)


class MediaRegression:
    """Checks of one test; the fixture `media_regression` gives it."""

    def __init__(self, request: pytest.FixtureRequest) -> None:
        self._node = request.node
        self._config = request.config
        self._names: set[str] = set()

    def check(
        self,
        frames: Source,
        name: str,
        *,
        fps: float = DEFAULT_FPS,
        settings: Mapping[str, object] | None = None,
        **bounds: float | None,
    ) -> ClipComparison | None:
        """Compare frames with the golden file of this name, or write it with `--update-golden`.

        The golden file is ``golden/TEST_FILE/NAME.png`` beside the test file, ``.webm`` of a clip;
        both are lossless. Parameters of the test are part of its name.

        Args:
            frames: An image or a clip in any form that `chipsparse.compare` takes.
            name: Letters, digits, ``_``, ``.`` and ``-``.
            fps: Frames per second of a golden clip, for those who watch it.
            settings: Facts to keep in the record of the golden file, such as seed and steps.
            bounds: ``min_psnr``, ``min_ssim``, ``max_lpips``, ``max_pixel`` and ``max_flicker``,
                as in `chipsparse.experiments.comparison.Bounds`. Every frame must keep them.
                None at all: all pixels must be the same.

        Returns:
            The comparison; None where the golden file was written.

        Raises:
            ValueError: Frames, name or bounds are wrong, or LPIPS cannot be measured.
        """
        __tracebackhide__ = True
        given = Bounds(**bounds)
        file = self._golden_file(name)
        now = read_frames(frames)
        clips = [file.with_name(f"{file.name}{suffix}") for suffix in (".png", ".webm")]
        if self._config.getoption("--update-golden"):
            self._update(clips, now, fps=fps, settings=settings or {})
            return None
        golden = next((clip for clip in clips if clip.exists()), None)
        if golden is None:
            new = self._keep_new(file, now, fps)
            why = f"there is no golden file {file}.*; make it with: {self._update_command()}"
            self._fail(name, why, file=new)
        reference = read_frames(golden)
        labels = ("golden", "now")
        try:
            check_fit(reference, now, names=labels)
        except ValueError as error:
            self._fail(name, str(error), file=self._keep_new(file, now, fps))
        found = compare(reference, now, lpips=given.max_lpips is not None)
        broken = (given if given.given else EXACT).broken(found)
        if broken:
            self._keep_new(file, now, fps)
            why = "; ".join(bound.text for bound in broken)
            self._fail_beside(name, why, reference, now, labels, broken[0].frame, fps)
        return found

    def against_dense(
        self,
        pipe: Pipeline,
        call: Mapping[str, Any] | Callable[[Any], Source],
        *,
        quality: str | None = "balanced",
        config: object = None,
        name: str = "against-dense",
        fps: float = DEFAULT_FPS,
        **bounds: float | None,
    ) -> ClipComparison:
        """Run a pipeline sparse and dense with the same random numbers, and compare both.

        Args:
            pipe: A diffusers pipeline, which is as before afterwards, but not patched.
            call: The arguments of its call; or a function that takes the pipeline and returns
                frames, and that makes its generator itself.
            quality: A named quality, see `chipsparse.enable`; ignored with ``config``.
            config: A config or profile in place of a quality.
            name: What the page calls it.
            fps: Frames per second of the clip on the page.
            bounds: As of `check`; at least one.

        Returns:
            The comparison of sparse with dense.

        Raises:
            ValueError: No bound is given, or the pipeline cannot run so.
        """
        __tracebackhide__ = True
        given = Bounds(**bounds)
        if not given.given:
            raise ValueError("give a bound, such as min_psnr: sparse and dense frames differ")
        how = {"quality": quality} if config is None else {"config": config}
        # Sparse first: its end restores a pipeline that was patched before, too.
        with _same_numbers(call), enable(pipe, **how):
            sparse = read_frames(_called(pipe, call))
        with _same_numbers(call):
            dense = read_frames(_called(pipe, call))
        found = compare(dense, sparse, lpips=given.max_lpips is not None)
        broken = given.broken(found)
        if broken:
            why = "; ".join(bound.text for bound in broken)
            frame = broken[0].frame
            self._fail_beside(name, why, dense, sparse, ("dense", "sparse"), frame, fps)
        return found

    # Names and files.

    def _golden_file(self, name: str) -> Path:
        """Return the golden file without its suffix."""
        if not NAME.fullmatch(name):
            raise ValueError(f"the name {name!r} may have letters, digits, '_', '.' and '-' alone")
        if name in self._names:
            raise ValueError(f"the name {name} is checked twice in this test; use two names")
        self._names.add(name)
        case = getattr(self._node, "callspec", None)
        if case is not None:
            name = f"{name}-{_file_name(case.id)}"
        test = Path(self._node.path)
        chosen = self._config.getoption("--golden-dir")
        if chosen is None:
            return test.parent / "golden" / test.stem / name
        folder = Path(self._config.invocation_params.dir / chosen)
        return folder / self._in_root(test.with_suffix("")) / name

    def _in_root(self, path: Path) -> Path:
        """Return a path from pytest's root folder on; the name alone outside of it."""
        root = self._config.rootpath
        return path.relative_to(root) if path.is_relative_to(root) else Path(path.name)

    def _update_command(self) -> str:
        chosen = self._config.getoption("--golden-dir")
        where = [] if chosen is None else ["--golden-dir", chosen]
        return shlex.join(["pytest", self._node.nodeid, "--update-golden", *where])

    def _update(
        self,
        clips: list[Path],
        now: np.ndarray,
        *,
        fps: float,
        settings: Mapping[str, object],
    ) -> None:
        """Write a golden file and its record, unless its pixels are the same already."""
        image, video = clips
        file, other = (image, video) if len(now) == 1 else (video, image)
        if file.exists() and np.array_equal(read_frames(file), now):
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        write_lossless(file, now, fps=fps)
        other.unlink(missing_ok=True)
        record = {
            "test": self._node.nodeid,
            "frames": len(now),
            "height": now.shape[1],
            "width": now.shape[2],
            "settings": {key: _plain(value) for key, value in settings.items()},
            "versions": _versions(),
            "python": platform.python_version(),
            "device": _device(),
        }
        text = json.dumps(record, indent=1, ensure_ascii=False)
        write_text("--update-golden", file.with_suffix(f"{file.suffix}.json"), f"{text}\n")
        self._node.user_properties.append((UPDATE, str(file)))

    def _keep_new(self, golden: Path, now: np.ndarray, fps: float) -> Path:
        """Write frames where they can be taken for the new golden file from."""
        suffix = ".png" if len(now) == 1 else ".webm"
        place = self._in_root(golden.with_name(f"{golden.name}{suffix}"))
        file = outcome_folder(self._config) / "new" / place
        file.parent.mkdir(parents=True, exist_ok=True)
        write_lossless(file, now, fps=fps)
        return file

    # Failures.

    def _fail_beside(
        self,
        name: str,
        why: str,
        reference: np.ndarray,
        now: np.ndarray,
        labels: tuple[str, str],
        frame: int,
        fps: float,
    ) -> NoReturn:
        """Write both clips and their difference side by side, and fail."""
        __tracebackhide__ = True
        pair = (reference, labels[0]), [(now, labels[1])]
        rows, _ = difference_rows(*pair, factor=None, in_one_row=True)
        shown = stack_panels(rows)
        folder = outcome_folder(self._config) / "failures"
        folder.mkdir(parents=True, exist_ok=True)
        picture = folder / f"{_file_name(f'{self._node.nodeid}-{name}')}.png"
        write_lossless(picture, shown[frame : frame + 1], fps=fps)
        clip = picture
        if len(shown) > 1:
            clip = picture.with_suffix(".webm")
            write_lossless(clip, shown, fps=fps)
        self._fail(name, why, file=clip, picture=picture)

    def _fail(self, name: str, why: str, *, file: Path, picture: Path | None = None) -> NoReturn:
        __tracebackhide__ = True
        folder = outcome_folder(self._config)
        failure = {
            "test": self._node.nodeid,
            "name": name,
            "why": why,
            "file": file.relative_to(folder).as_posix(),
            "picture": picture and picture.relative_to(folder).as_posix(),
        }
        self._node.user_properties.append((FAILURE, json.dumps(failure)))
        pytest.fail(f"{name}: {why}\nsee {file}")


def _file_name(text: str) -> str:
    """Return a text as a part of a file's name, which differs for each text."""
    plain = re.sub(r"[^\w.-]+", "_", text)
    if plain == text and len(plain) <= 80:
        return plain
    return f"{plain[:80]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _plain(value: object) -> object:
    return value if isinstance(value, (bool, int, float, str, type(None))) else repr(value)


def _versions() -> dict[str, str]:
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _device() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return platform.processor() or platform.machine()


def _called(pipe: Pipeline, call: Mapping[str, Any] | Callable[[Any], Source]) -> Source:
    return pipe(**call) if isinstance(call, Mapping) else call(pipe)


@contextmanager
def _same_numbers(call: Mapping[str, Any] | Callable[[Any], Source]) -> Iterator[None]:
    """Give back the random numbers that a call takes, from its generators and PyTorch's own."""
    given = call.get("generator") if isinstance(call, Mapping) else None
    generators = given if isinstance(given, (list, tuple)) else [given]
    states = [(item, item.get_state()) for item in generators if item is not None]
    with torch.random.fork_rng():
        yield
    for generator, state in states:
        generator.set_state(state)
