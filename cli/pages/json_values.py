"""The values of a JSON file, read with their place, so that an error can say where it is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chipsparse.cli.errors import UserError, first_line

# More steps or layers than anything has; a damaged file must not make a page of them.
MOST_PLACES = 100_000
# Larger than anything that is measured; charts of such numbers overflow.
LARGEST_NUMBER = 1e30


@dataclass(frozen=True)
class Values:
    """A JSON object at some place of a file.

    Every method raises `UserError` with the place where a value is not what it must be.

    Attributes:
        file: named in errors.
        place: of the object, such as ``steps[3]``; empty for the whole file.
        content: by name.
    """

    file: Path
    place: str
    content: dict[str, Any]

    def __contains__(self, name: str) -> bool:
        """Whether there is a value that is not null."""
        return self.content.get(name) is not None

    def text(self, name: str) -> str:
        """A text."""
        value = self.content.get(name)
        return value if isinstance(value, str) else self._fail(name, "a text")

    def text_or_none(self, name: str) -> str | None:
        """A text, or None where there is none."""
        return self.text(name) if name in self else None

    def number(self, name: str) -> float:
        """A number, of a size that can be drawn."""
        value = self.content.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return self._fail(name, "a number")
        fits = abs(value) <= LARGEST_NUMBER  # not so for NaN
        return value if fits else self._fail(name, "a finite number")

    def number_or_none(self, name: str) -> float | None:
        """The same, or None where there is none."""
        return self.number(name) if name in self else None

    def count(self, name: str) -> int:
        """A whole number, 0 or more."""
        value = self.number(name)
        return int(value) if value == int(value) >= 0 else self._fail(name, "a whole number")

    def index(self, name: str) -> int:
        """The number of a step, a layer or the like, or how many there are."""
        value = self.count(name)
        return value if value < MOST_PLACES else self._fail(name, f"below {MOST_PLACES:,}")

    def choice(self, name: str, choices: tuple[str, ...]) -> str:
        """One of some words."""
        value = self.text(name)
        return value if value in choices else self._fail(name, f"one of {', '.join(choices)}")

    def flag(self, name: str) -> bool:
        """True or false; false where there is none."""
        value = self.content.get(name) or False
        return value if isinstance(value, bool) else self._fail(name, "true or false")

    def object(self, name: str) -> Values:
        """An object; an empty one where there is none."""
        value = self.content.get(name)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            return self._fail(name, "an object")
        return Values(self.file, self._at(name), value)

    def require(self, name: str) -> None:
        """Fails where there is no value, or null."""
        if name not in self:
            self._fail(name, "a value")

    def objects(self, name: str) -> list[Values]:
        """The objects of a list; none where there is none."""
        return [
            Values(self.file, f"{self._at(name)}[{index}]", value)
            if isinstance(value, dict)
            else self._fail(f"{name}[{index}]", "an object", value)
            for index, value in enumerate(self._list(name))
        ]

    def indices(self, name: str) -> list[int]:
        """The numbers of steps or layers in a list; none where there is none."""
        return [each.index("value") for each in self._each(name)]

    def texts(self, name: str) -> list[str]:
        """The texts of a list; none where there is none."""
        return [each.text("value") for each in self._each(name)]

    def choices(self, name: str, choices: tuple[str, ...]) -> list[str]:
        """The texts of a list, each one of some words."""
        return [each.choice("value", choices) for each in self._each(name)]

    def numbers_or_none(self, name: str) -> list[float | None]:
        """The numbers of a list, None where there is null; none where there is no list."""
        return [each.number_or_none("value") for each in self._each(name)]

    def members(self) -> Iterator[tuple[str, Values]]:
        """The objects of this one, by name."""
        for name in self.content:
            yield name, self.object(name)

    def numbers_by_name(self) -> dict[str, float]:
        """The numbers of this object, by name."""
        return {name: self.number(name) for name in self.content}

    def texts_by_name(self) -> dict[str, str]:
        """The texts of this object, by name."""
        return {name: self.text(name) for name in self.content}

    def _each(self, name: str) -> list[Values]:
        """Each value of a list as the only one of an object, for the methods above."""
        return [
            Values(self.file, f"{self._at(name)}[{index}]", {"value": value})
            for index, value in enumerate(self._list(name))
        ]

    def _list(self, name: str) -> list[Any]:
        value = self.content.get(name)
        if value is None:
            return []
        return value if isinstance(value, list) else self._fail(name, "a list")

    def _at(self, name: str) -> str:
        return f"{self.place}.{name}" if self.place else name

    def _fail(self, name: str, wanted: str, value: Any = None) -> Any:
        found = json.dumps(self.content.get(name, value), ensure_ascii=False)
        found = found if len(found) <= 40 else f"{found[:37]}..."
        place = self._at(name).removesuffix("].value") + ("]" if name == "value" else "")
        raise UserError(f"{self.file} is damaged: {place} is {found}, not {wanted}")


def read_values(path: Path) -> Values:
    """The JSON object of a file; raises `UserError` where there is none."""
    try:
        if path.exists() and not path.is_file():  # a pipe may never end
            raise UserError(f"{path} is no regular file")
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"the file {path} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} could not be read: {first_line(error)}") from error
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is no JSON: {first_line(error)}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is no JSON object, which every file of chipsparse is")
    return Values(path, "", content)
