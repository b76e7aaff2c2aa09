"""``python -m benchmarks.moving_photographs.photographs OUT``: photographs of Debian's wallpapers.

Downloads the packages with ``apt-get download``, or takes unpacked ones (``--unpacked``), and
writes each photograph as a JPEG. ``photographs.txt`` names them, README.md their licences.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from PIL import Image

SIDE = 900  # pixels of the shorter side
LONGEST = 1600  # of the longer one; more is cut off on both ends
QUALITY = 88
LIST = Path(__file__).with_name("photographs.txt")


def listed() -> list[list[str]]:
    """The package and the file of each photograph."""
    lines = LIST.read_text(encoding="utf-8").splitlines()
    return [line.split() for line in lines if not line.startswith("#")]


def unpack(packages: Iterable[str], folder: Path) -> None:
    """Downloads packages and unpacks them into a folder."""
    subprocess.run(["apt-get", "download", *packages], cwd=folder, check=True)
    for package in sorted(folder.glob("*.deb")):
        subprocess.run(["dpkg-deb", "-x", str(package), str(folder)], check=True)


def prepare(share: Path, out: Path, names: Sequence[str]) -> int:
    """Writes ``000.jpg`` and so on, one for each name; returns their bytes in all.

    Raises:
        FileNotFoundError: names what is not in ``share``; nothing is written then.
    """
    missing = [name for name in names if not (share / name).is_file()]
    if missing:
        raise FileNotFoundError(f"not in {share}: {', '.join(missing)}")
    out.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(names):
        image = Image.open(share / name).convert("RGB")
        scale = SIDE / min(image.size)
        size = round(image.width * scale), round(image.height * scale)
        image = image.resize(size, Image.Resampling.LANCZOS)
        left, top = (max(0, side - LONGEST) // 2 for side in size)
        image = image.crop((left, top, size[0] - left, size[1] - top))
        image.save(out / f"{number:03d}.jpg", quality=QUALITY)
    return sum(file.stat().st_size for file in out.glob("*.jpg"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Prepares the photographs in a folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="folder for the JPEGs")
    parser.add_argument("--unpacked", type=Path, help="folder in which the packages are unpacked")
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        root = args.unpacked or Path(folder)
        if args.unpacked is None:
            unpack(dict.fromkeys(package for package, _ in listed()), root)
        names = [name for _, name in listed()]
        size = prepare(root / "usr" / "share", args.out, names)
    print(f"{len(names)} photographs, {size / 1e6:.1f} MB, in {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
