"""The arithmetic between two metrics pages."""

import math
from pathlib import Path

import pytest

from pdproxy_lab.demo.figures import ENGINE_NAMES
from pdproxy_lab.demo.pages import (
    Page,
    Reading,
    buckets,
    increase,
    parse,
    quantile,
    rate,
    total,
    values,
)

VLLM = Path(__file__).parents[1] / "data" / "metrics_decode.txt"


def counters(*found: float) -> list[Reading]:
    return [
        Reading(10.0 + second, {"c_total": {(("a", "x"),): value}})
        for second, value in enumerate(found)
    ]


def test_a_page_of_vllm_is_read_with_its_labels() -> None:
    page = parse(VLLM.read_text().partition("\n\n")[2], ENGINE_NAMES)
    assert total(page, "vllm:generation_tokens_total") == 536
    assert total(page, "vllm:nixl_bytes_transferred_count") == 21
    assert total(page, "vllm:nixl_bytes_transferred_sum") == 19_005_440
    assert [labels["model_name"] for labels, _ in values(page, "vllm:kv_cache_usage_perc")] == [
        "tiny"
    ]


def test_only_what_was_asked_for_is_read() -> None:
    page = parse(VLLM.read_text().partition("\n\n")[2], ["vllm:num_requests_running{"])
    assert list(page) == ["vllm:num_requests_running"]


def test_what_is_no_metrics_page_is_refused() -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - the library's own words
        parse("a_total{x= 1\n", ["a_"])


def test_a_counter_grows() -> None:
    assert increase(counters(5, 7, 12), "c_total") == 7
    assert rate(counters(5, 7, 12), "c_total") == 3.5


def test_a_counter_that_fell_was_started_anew() -> None:
    assert increase(counters(100, 110, 4, 6), "c_total") == 10 + 4 + 2


def test_a_series_that_appears_began_at_zero() -> None:
    empty: Page = {}
    assert increase([Reading(0.0, empty), *counters(3)], "c_total") == 3


def test_only_series_with_the_labels_count() -> None:
    page: Page = {"c_total": {(("a", "x"), ("b", "1")): 2.0, (("a", "y"), ("b", "1")): 5.0}}
    assert total(page, "c_total", a="x") == 2
    assert increase([Reading(0.0, {}), Reading(1.0, page)], "c_total", a="y") == 5


@pytest.mark.parametrize("readings", [[], counters(5)])
def test_one_reading_has_no_rate(readings: list[Reading]) -> None:
    assert rate(readings, "c_total") is None


def test_buckets_are_those_of_the_window_over_all_series() -> None:
    def page(one: float, two: float) -> Page:
        return {
            "h_bucket": {
                (("le", "0.1"), ("path", "a")): one,
                (("le", "+Inf"), ("path", "a")): one + 1,
                (("le", "0.1"), ("path", "b")): two,
                (("le", "+Inf"), ("path", "b")): two,
            }
        }

    assert buckets([Reading(0.0, page(1, 1)), Reading(1.0, page(3, 2))], "h") == [
        (0.1, 3.0),
        (math.inf, 3.0),
    ]


def test_quantiles_are_linear_within_a_bucket() -> None:
    found = [(0.1, 0.0), (0.2, 10.0), (0.4, 20.0), (math.inf, 20.0)]
    assert quantile(found, 0.5) == pytest.approx(0.2)
    assert quantile(found, 0.75) == pytest.approx(0.3)
    assert quantile(found, 0.25) == pytest.approx(0.15)


def test_the_lowest_bucket_begins_at_zero() -> None:
    assert quantile([(0.1, 4.0), (math.inf, 4.0)], 0.5) == pytest.approx(0.05)


def test_what_lies_above_the_last_bound_is_told_as_that_bound() -> None:
    assert quantile([(0.1, 0.0), (math.inf, 5.0)], 0.99) == 0.1


@pytest.mark.parametrize("found", [[], [(0.1, 0.0), (math.inf, 0.0)]])
def test_nothing_observed_has_no_quantile(found: list[tuple[float, float]]) -> None:
    assert quantile(found, 0.5) is None
