"""What lies outside of what a profile was fitted to, and how wrong predictions are there."""

from __future__ import annotations

import msgspec
import pytest

from pdproxy.engine_model.fitted import Compared, FittedRanges, Ranges, extrapolated, usual

FITTED = FittedRanges(
    prompt_tokens=(1000, 8000),
    answer_tokens=(128, 500),
    sequences=(0, 40),
    compared=[
        Compared(where=Ranges(prompt_tokens=(8000, 16_000)), off={"ttft": -0.1, "tpot": 0.05}),
        Compared(where=Ranges(prompt_tokens=(100, 20_000)), off={"ttft": 0.04, "tpot": -0.3}),
    ],
)


def test_what_lies_within_is_not_extrapolated():
    # a tenth beyond an end is near enough, and of chunks and contexts the profile says nothing
    within = Ranges(prompt_tokens=(910, 8700), sequences=(20, 44), chunk=(16, 16_384))
    assert extrapolated(FITTED, within) is None
    assert extrapolated(FITTED, Ranges()) is None


def test_a_profile_that_says_no_range_is_not_extrapolated():
    assert extrapolated(None, Ranges(prompt_tokens=(1, 1_000_000))) is None


def test_the_worst_of_the_comparisons_there_is_the_error():
    found = extrapolated(FITTED, Ranges(prompt_tokens=(4000, 15_000), answer_tokens=(300, 300)))
    assert found is not None
    # prompts of up to 8,000 tokens were fitted, longer ones are in both comparisons
    assert found.off == {"ttft": -0.1, "tpot": -0.3}
    assert str(found) == (
        "the profile was not fitted to prompts of 4000 to 15000 tokens (fitted to 1000 to 8000): "
        "measured there, predictions were wrong: TTFT by 10 % too short and TPOT by 30 % too short "
        "at worst"
    )
    long = extrapolated(FITTED, Ranges(prompt_tokens=(9000, 15_000)))
    assert long is not None
    assert long.off == {"ttft": -0.1, "tpot": -0.3}


def test_without_a_comparison_the_error_is_unknown():
    found = extrapolated(FITTED, Ranges(prompt_tokens=(15_000, 15_000), sequences=(100, 100)))
    assert found is not None
    assert [one.name for one in found.outside] == ["prompt_tokens", "sequences"]
    assert found.off == {}
    beyond_all = extrapolated(FITTED, Ranges(prompt_tokens=(9000, 30_000)))
    assert beyond_all is not None
    assert beyond_all.off == {}
    assert str(found).endswith("100 sequences at once per engine (fitted to 0 to 40): "
                               "how wrong predictions are there is unknown")  # fmt: skip


def test_numbers_that_are_means_are_rounded():
    found = extrapolated(FITTED, Ranges(sequences=(123.4, 123.4), prompt_tokens=(4000, 16_384)))
    assert found is not None
    assert "4000 to 16384 tokens" in str(found)
    assert " 120 sequences" in str(found)


def test_ranges_of_several_runs_are_joined():
    one = Ranges(prompt_tokens=(100, 200), sequences=(3, 3))
    assert one.with_(Ranges(prompt_tokens=(50, 150), chunk=(8, 8))) == Ranges(
        prompt_tokens=(50, 200), sequences=(3, 3), chunk=(8, 8)
    )


def test_the_usual_lengths_leave_out_a_twentieth_at_both_ends():
    assert usual(range(1, 101)) == (6, 95)
    assert usual([7]) == (7, 7)
    assert usual([]) is None


@pytest.mark.parametrize(
    "content",
    [
        '{"prompt_tokens": [2, 1]}',
        '{"sequences": [-1, 1]}',
        '{"chunk": [1, 1e12]}',
        '{"compared": [{"where": {}, "off": {"gap": 1}}]}',
        '{"compared": [{"where": {}, "off": {"ttft": -2}}]}',
    ],
)
def test_invalid_ranges_are_refused(content):
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(content, type=FittedRanges)
