"""``python -m docs.tables``: writes the tables of the documentation anew."""

from __future__ import annotations

from chipsparse.profiles.measured import MEASURED_FILE
from docs.tables import measured, pages, renewed


def main() -> None:
    """Write the pages that change, and print their names."""
    MEASURED_FILE.write_text(measured.measured_classes(), encoding="utf-8")
    for page in pages():
        before = page.read_text(encoding="utf-8")
        after = renewed(before)
        if after != before:
            page.write_text(after, encoding="utf-8")
            print(page)


if __name__ == "__main__":
    main()
