"""The files of a command by name: none that it writes may take the place of one that it reads."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

from chipsparse.common import stopping
from chipsparse.common.errors import UserError

# Formats of single images: several frames become numbered files.
IMAGES = (".png", ".jpg", ".jpeg", ".webp")


class Write(NamedTuple):
    """A file that a command writes, and the option that it comes from."""

    option: str
    path: Path


def check_inputs_stay(writes: Iterable[Write], reads: Iterable[Path]) -> None:
    """Raise `UserError` where a write would replace a file that is read, or a link.

    A folder among ``reads`` stands for all files in it. Files are told by what they are, not by
    their names: a link, another spelling and another case of the letters are the same file.
    """
    known = {_identity(path): path for path in reads if os.path.exists(path)}
    for option, path in writes:
        within = Path(os.path.realpath(path))
        for place in (within, *within.parents) if os.path.exists(within) else ():
            read = known.get(_identity(place))
            if read is not None:
                file = read if place is within else read / within.relative_to(place)
                raise UserError(f"{option} {path} would replace {file}, which is read")
        if path.is_symlink():
            raise UserError(
                f"{option} {path} is a link to {os.readlink(path)}, which it would replace; name "
                "the file itself, or remove the link",
            )


def _identity(path: Path) -> tuple[int, int]:
    """Return what tells an existing file or folder from all others, whatever its name."""
    found = path.stat()
    return found.st_dev, found.st_ino


@contextmanager
def scratch_folder(parent: Path | None = None, prefix: str = ".chipsparse-") -> Iterator[Path]:
    """Give a new folder, which is gone behind the block, and where the process ends at once."""
    with tempfile.TemporaryDirectory(prefix=prefix, dir=parent) as name:
        remove = partial(shutil.rmtree, name, ignore_errors=True)
        with stopping.done_at_least(remove):
            yield Path(name)


def clip_sources(path: Path) -> list[Path]:
    """Return the files that a clip may be read from: one, or images of a folder or of a name."""
    if os.path.isdir(path):
        return sorted(path.glob("*.[pP][nN][gG]"))
    return [path, *numbered_files(path)]


# Names that are made of others.


def beside(path: Path, word: str) -> Path:
    """Return ``out-dense.mp4`` for ``out.mp4`` and ``dense``."""
    return path.with_name(f"{path.stem}-{word}{path.suffix}")


def numbered(path: Path, number: int, count: int) -> Path:
    """Return ``out-000.mp4`` for ``out.mp4`` and the first file of so many."""
    digits = max(3, len(str(count - 1)))  # so that names sort
    return beside(path, f"{number:0{digits}}")


def numbered_files(path: Path) -> list[Path]:
    """Return the files that are there with the names of frames, in the order of their numbers."""
    name = re.compile(re.escape(path.stem) + r"-(\d{3,})" + re.escape(path.suffix))
    matches = ((name.fullmatch(file.name), file) for file in path.parent.glob("*"))
    return [file for _, file in sorted((int(match[1]), file) for match, file in matches if match)]


def clip_writes(option: str, path: Path, *, single: bool = True) -> list[Write]:
    """Return the files that a clip is written to; ``single``: it has one frame, or is a video.

    How many images there will be is not always known beforehand: all that are there count.
    """
    if single or path.suffix.lower() not in IMAGES:
        return [Write(option, path)]
    return [Write(option, path), *(Write(option, file) for file in numbered_files(path))]
