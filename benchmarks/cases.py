"""The named cases: shapes of real models, shared by the tests and the benchmarks."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Case:
    """One layer of a model at one video or image size.

    Attributes:
        name: how ``--case`` and the records call it.
        batch: B.
        heads: H.
        tokens: N, both the rows and the columns of attention.
        head_dim: D.
        channels: C, width of the hidden states.
        mlp_width: F, neurons of the MLP.
        keep_fraction: share of the columns that a query group of sparse attention keeps.
        mlp_tokens: rows of the MLP per sample; None for all tokens.
        mlp_keep_fraction: share of the neurons that a token group of the sparse MLP recomputes.
    """

    name: str
    batch: int
    heads: int
    tokens: int
    head_dim: int
    channels: int
    mlp_width: int
    keep_fraction: float
    mlp_tokens: int | None = None
    mlp_keep_fraction: float = 0.3

    @property
    def mlp_rows(self) -> int:
        """Rows of the MLP in one sample."""
        return self.tokens if self.mlp_tokens is None else self.mlp_tokens

    def scaled(self, *, tokens: int | None = None, heads: int | None = None) -> Case:
        """The case with fewer or more tokens and heads; its name tells where they changed."""
        tokens = self.tokens if tokens is None else tokens
        heads = self.heads if heads is None else heads
        if (tokens, heads) == (self.tokens, self.heads):
            return self
        name = f"{self.name.split()[0]} N{tokens} H{heads}"
        mlp_tokens = None if self.mlp_tokens is None else min(self.mlp_tokens, tokens)
        return replace(self, name=name, tokens=tokens, heads=heads, mlp_tokens=mlp_tokens)


CASES = {
    case.name: case
    for case in (
        # 720x1280, 129 frames: 118,800 video tokens and 256 of text
        Case("hunyuan_720p", 1, 24, 119_056, 128, 3072, 12_288, 0.07),
        Case("hunyuan_32k", 1, 24, 32_256, 128, 3072, 12_288, 0.07),
        # 720x1280, 81 frames
        Case("wan14b_720p", 1, 40, 75_600, 128, 5120, 13_824, 0.10, mlp_tokens=32_768),
        # 480x832, 81 frames
        Case("wan1b_480p", 1, 12, 32_760, 128, 1536, 8960, 0.10),
        # FLUX.1-dev: 3,840 image tokens and 512 of text
        Case("flux_1280x768", 1, 24, 4352, 128, 3072, 12_288, 0.175, 4096, 0.29),
        # the image tokens alone, as in the double blocks
        Case("flux_image", 1, 24, 3840, 128, 3072, 12_288, 0.175, mlp_keep_fraction=0.29),
        Case("d64_video", 2, 30, 17_776, 64, 1920, 7680, 0.10),
        # tails everywhere: no length is a multiple of a tile
        Case("odd", 2, 3, 1337, 128, 384, 1112, 0.25, mlp_tokens=333),
        Case("odd_d64", 2, 3, 1337, 64, 192, 1112, 0.25, mlp_tokens=333),
    )
}
