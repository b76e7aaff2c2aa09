"""``python -m benchmarks.equal_work FILE... -o FILE``: joins records, prints their tables."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.equal_work.curves import compared, joined
from benchmarks.equal_work.tables import text_of
from benchmarks.records import read, write_compact


def main() -> None:
    """Reads the files, writes one with each clip once, prints."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.equal_work", description=__doc__)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("-o", "--output", type=Path, help="write all records here")
    args = parser.parse_args()
    records = joined(read(*args.files))
    if args.output is not None:
        write_compact(records, args.output)
    print(text_of(compared(records)))


if __name__ == "__main__":
    main()
