"""What step caches were published with, nearest to a speed-up."""

import pytest

from chipsparse.profiles.published import published_psnr


@pytest.mark.parametrize(
    ("model", "speedup", "experts", "text"),
    [
        ("HunyuanVideoTransformer3DModel", 2.4, 1, "28-34 dB at 2x"),
        ("HunyuanVideoTransformer3DModel", 2.5, 1, "24-27 dB at 3x"),
        ("HunyuanVideoTransformer3DModel", 9.0, 1, "21-23 dB at 4.5x"),
        ("WanTransformer3DModel", 3.0, 2, "24-26 dB at 1.7x"),
        ("QwenImageTransformer2DModel", 1.0, 1, "36 dB at 1.4x"),
        ("MochiTransformer3DModel", 3.6, 2, "21-27 dB at 3x"),
    ],
)
def test_the_nearest_published_range(model, speedup, experts, text):
    assert str(published_psnr(model, speedup, experts=experts)) == text
