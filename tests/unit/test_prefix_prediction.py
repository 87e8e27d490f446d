"""The cached tokens that engines will report, and how right that was."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy.scheduling.prefix.prediction import PredictionScore, cached_tokens


@pytest.mark.parametrize(
    ("matched", "prompt", "block_size", "cached"),
    [
        (0, 100, 16, 0),
        (96, 100, 16, 96),
        (96, 97, 16, 96),
        (96, 96, 16, 80),  # the last block is computed again for its last token
        (100, 100, 16, 96),
        (48, 200, 64, 0),
        (16, 16, 16, 0),
        (16, 17, 16, 16),
        (0, 0, 16, 0),
        (64, 1, 16, 0),
    ],
)
def test_engines_reuse_whole_blocks_and_never_all(matched, prompt, block_size, cached):
    assert cached_tokens(matched, prompt, block_size) == cached


def test_engines_with_eagle_compute_a_block_more():
    assert cached_tokens(96, 100, 16, drops_last=True) == 80
    assert cached_tokens(96, 96, 16, drops_last=True) == 64
    assert cached_tokens(16, 100, 16, drops_last=True) == 0
    assert cached_tokens(0, 100, 16, drops_last=True) == 0


@given(st.integers(0, 10_000), st.integers(1, 10_000), st.integers(1, 256), st.booleans())
def test_a_prediction_is_possible(matched, prompt, block_size, drops_last):
    cached = cached_tokens(matched, prompt, block_size, drops_last=drops_last)
    assert 0 <= cached <= min(matched, prompt - 1)
    assert cached % block_size == 0


def test_the_score_sums_errors():
    score = PredictionScore()
    errors = [score.add(*one) for one in ((96, 96), (0, 0), (96, 32), (16, 80), (0, 16))]
    assert errors == [0, 0, 64, -64, -16]
    assert (score.exact, score.too_high, score.too_low) == (2, 1, 2)
    assert (score.predicted, score.reported, score.over, score.under) == (208, 224, 64, 80)
    assert score.over - score.under == score.predicted - score.reported
