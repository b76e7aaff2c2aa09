"""Where tokens and heads are cut among processes."""

from dataclasses import replace

import pytest

from chipsparse.layout import LayerKind, ModelLayout
from chipsparse.parallel.degrees import Parallel
from chipsparse.parallel.sequence_cut import check_heads, cut_sequence, with_largest_share

ROWS = 16
KIND = LayerKind("block", 2, 64)
VIDEO = ModelLayout(kinds=(KIND,), heads=5, head_dim=8, batch=1, grids=((4, 8, 8),))
IMAGE_MLP = replace(VIDEO, kinds=(replace(KIND, mlp_sees_text=False),))


def starts(cut):
    return [cut.first(rank) for rank in range(len(cut.grid))]


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 16])
def test_a_video_is_cut_at_blocks_of_rows(ranks):
    cut = cut_sequence(VIDEO, ranks, ROWS)
    assert (sum(cut.grid), cut.text) == (256, (0,) * ranks)
    assert all(start % ROWS == 0 for start in starts(cut))
    assert max(cut.grid) - min(cut.grid) <= ROWS
    odd = replace(VIDEO, grids=((1, 5, 9),))
    assert cut_sequence(odd, 3, ROWS).grid == (16, 16, 13)  # the last block may be ragged


@pytest.mark.parametrize(("text_first", "owner"), [(True, 0), (False, 3)])
def test_text_is_on_the_outermost_rank_which_has_less_video(text_first, owner):
    cut = cut_sequence(replace(VIDEO, text_tokens=64, text_first=text_first), 4, ROWS)
    assert cut.text == tuple(64 if rank == owner else 0 for rank in range(4))
    assert cut.tokens == (80, 80, 80, 80)
    # A text that is longer than a share leaves a block of the image beside it.
    cut = cut_sequence(replace(VIDEO, text_tokens=500, text_first=text_first), 4, ROWS)
    assert cut.text[owner] == 500
    assert 0 < cut.grid[owner] <= ROWS
    assert sum(cut.grid) == 256
    assert min(cut.grid) > 0


@pytest.mark.parametrize("text", [1, 16, 33])
@pytest.mark.parametrize("layout", [VIDEO, IMAGE_MLP])
def test_blocks_are_counted_from_leading_text_where_the_mlp_sees_it(layout, text):
    cut = cut_sequence(replace(layout, text_tokens=text, text_first=True), 3, ROWS)
    before = text if layout is VIDEO else 0
    assert all((before + start) % ROWS == 0 for start in starts(cut)[1:])


def test_every_rank_plans_with_the_largest_share():
    text = replace(VIDEO, text_tokens=20)
    cut = cut_sequence(text, 2, ROWS)
    layout = with_largest_share(text, cut)
    assert layout.own.tokens == layout.mlp_tokens(0) == max(cut.tokens)
    assert layout.own.heads == 3
    assert layout.tokens == len(layout.query_rows) == 276


def test_what_cannot_be_shared_is_refused_with_the_numbers():
    longer = replace(VIDEO, grids=((1, 8, 12),), text_tokens=480, text_first=True)
    assert cut_sequence(longer, 6, ROWS).grid == (16,) * 6
    with pytest.raises(ValueError, match=r"96 .* make 6 blocks of 16 rows, fewer than the 8"):
        cut_sequence(longer, 8, ROWS)
    with pytest.raises(ValueError, match=r"256 .* make 16 blocks of 16 rows, fewer than the 17"):
        cut_sequence(VIDEO, 17, ROWS)
    with pytest.raises(ValueError, match="5 attention heads, fewer than the 6"):
        check_heads(VIDEO, 6)
    check_heads(VIDEO, 5)
    assert Parallel(ulysses=3, guidance=2).ranks == 6
    with pytest.raises(ValueError, match="guidance: pipelines have two branches"):
        Parallel(guidance=3)
    for degree in (0, 1.5, True, "2"):
        with pytest.raises(ValueError, match="ulysses: must be a whole number from 1 on"):
            Parallel(ulysses=degree)
