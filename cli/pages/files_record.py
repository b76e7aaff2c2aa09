"""What `chipsparse compare` prints of two files with ``--json``."""

from __future__ import annotations

from collections.abc import Sequence

from chipsparse.cli.pages.names import name_of
from chipsparse.cli.pages.records import Clips, FileRecord, Index, Number


class FilesComparison(FileRecord):
    """Two files; a PSNR of None where both are the same."""

    kind = "files"
    marks = frozenset({"mode", "a", "b", "per_frame"})

    chipsparse: str
    a: str
    b: str
    frames: Index
    height: Index
    width: Index
    identical: bool = False
    lossy: Sequence[str] = ()
    psnr_db: Number | None = None
    ssim: Number | None = None
    lpips: Number | None = None
    lpips_missing: str = ""
    largest_difference: Number | None = None
    flicker_change: Number | None = None
    per_frame: Sequence[dict[str, Number | None]] = ()

    @property
    def title(self) -> str:
        """The headline."""
        return f"{name_of(self.b)} against {name_of(self.a)}"

    @property
    def clips(self) -> Clips:
        """Both files."""
        return Clips({"A": self.a, "B": self.b}, reference="A")
