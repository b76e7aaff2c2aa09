"""Names instead of folders: a page that is sent tells nobody who made it, and where."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from chipsparse.profiles.profile import ASSETS

# How Hugging Face's cache names the folders of a hub name.
HUB_FOLDER = re.compile(r"(?:^|[/\\])models--(.+?)--([^/\\]+)")
# An absolute folder, one below the home folder or the current one, up to its last slash.
START = r"(?<![\w/\\:.<~)\]-])"
NAME = r"[^\s/\\'\"<>|:*?,;()\[\]]+"
HOME = re.compile(START + rf"(?:/home/{NAME}|/Users/{NAME}|/root\b|[A-Za-z]:[/\\]Users[/\\]{NAME})")
BELOW = rf"(?:{NAME}[/\\])"
FOLDERS = re.compile(
    START + rf"(?:~[/\\]{BELOW}*|(?:\.{{1,2}}|[A-Za-z]:)?[/\\]{BELOW}+)(?=[^\s/\\])",
)
# Words of commands behind which there is a text, whatever it looks like.
TEXT_OPTIONS = frozenset({"--negative-prompt", "--"})


def name_of(text: str) -> str:
    """The last part of a path; a hub name, and a path of two parts, which looks like one, as it is.

    A folder of Hugging Face's cache gives the hub name that it is of.
    """
    hub = HUB_FOLDER.search(text)
    if hub is not None:
        return f"{hub[1]}/{hub[2]}"
    parts = [part for part in re.split(r"[/\\]", text) if part]
    beside = text.startswith(("/", "\\", "~", "./", "../")) or re.match(r"[A-Za-z]:[/\\]", text)
    return parts[-1] if parts and (beside or len(parts) > 2) else text


def command_text(words: Sequence[str]) -> str:
    """A command with names in place of paths; ``owner/name`` is one of the hub only as a model."""
    options = [word.startswith("--") for word in words]
    shown = []
    for place, word in enumerate(words):
        before = words[place - 1] if place and options[place - 1] else None
        if before == "--model":
            shown.append(name_of(word))
        elif before is not None and before not in TEXT_OPTIONS:
            shown.append(re.split(r"[/\\]", word)[-1] or word)
        else:
            shown.append(word)
    return shlex.join(shown)


def without_folders(text: str) -> str:
    """A sentence with the last part of each path in place of the whole."""
    if "/" not in text and "\\" not in text:  # as most texts of a page
        return text
    home = os.path.expanduser("~")
    if len(home) > 1:
        text = text.replace(home, "~")
    return FOLDERS.sub("", HOME.sub("~", text))


def bundled_name(place: str) -> str | None:
    """Return the name of what comes with chipsparse, such as ``tiny-wan``, else None."""
    path = Path(place).resolve()
    bundled = ASSETS.resolve()
    return str(path.relative_to(bundled)) if path.is_relative_to(bundled) else None


def short_place(place: str) -> str:
    """Return a path; of what comes with chipsparse its name alone."""
    name = bundled_name(place)
    return place if name is None else f"{name}, bundled"


def profile_text(source: str, quality: str | None) -> str:
    """Return a profile with the quality that is taken."""
    place = short_place(source)
    return place if quality is None else f"{quality}, from {place}"


def files_text(files: Sequence[Path | str]) -> str:
    """Return the names of one clip's files: one, or the first and the last of numbered ones."""
    return str(files[0]) if len(files) == 1 else f"{files[0]} to {Path(files[-1]).name}"
