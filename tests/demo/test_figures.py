"""Which figure comes from which metric, and over how long."""

import pytest

from pdproxy.observe.prompt_shares import PromptShare
from pdproxy_lab.demo.figures import WINDOW, EngineFigures, History, Latency
from pdproxy_lab.demo.pages import Page
from pdproxy_lab.demo.tally import Tally
from tests.demo.numbers import D0, P0, engine_page, proxy_page


def history() -> History:
    return History([P0, D0])


def test_rates_are_those_of_the_pages_in_the_window() -> None:
    h = history()
    h.add(
        100.0,
        proxy_page(10),
        {P0.url: engine_page(1000), D0.url: engine_page(generated=50, moved=1)},
    )
    h.add(
        102.0,
        proxy_page(14, 1),
        {P0.url: engine_page(3000), D0.url: engine_page(generated=70, moved=4)},
    )
    figures = h.figures(102.0)
    assert figures.elapsed == 2.0
    assert figures.engines == [
        EngineFigures(P0, True, 4, 1, 0.25, 1000.0),
        EngineFigures(D0, True, 4, 1, 0.25, 10.0),
    ]
    assert (figures.prompt_tokens_per_s, figures.output_tokens_per_s) == (1000.0, 10.0)
    assert figures.requests_per_s == 2.5
    assert figures.outcomes == {"ok": 14, "engine": 1}
    assert (figures.inflight, figures.queued) == (3, 2)
    assert figures.ttft.p50 == pytest.approx(0.05)
    assert figures.itl == Latency(None, None)
    assert (figures.transfers.count, figures.transfers.size, figures.transfers.bytes_per_s) == (
        4,
        4e6,
        1.5e6,
    )


def test_pages_from_before_the_window_are_forgotten_but_for_its_first() -> None:
    h = history()
    for second in range(31):
        h.add(float(second), proxy_page(min(15, second)), {})
    assert h.figures(30.0).requests_per_s == 0.0
    assert h.figures(30.0).outcomes["ok"] == 15
    h.add(31.0, proxy_page(15 + WINDOW), {})
    assert h.figures(31.0).requests_per_s == pytest.approx(1.0)


def test_how_prompts_were_served_is_that_of_the_window() -> None:
    def page(*tokens: float) -> Page:
        series = (("split", "none"), ("alone", "short_prompt"), ("beside_idle", "n"))
        counts: dict[tuple[tuple[str, str], ...], float] = {
            (("reason", reason), ("served", served)): count
            for (served, reason), count in zip(series, tokens, strict=True)
        }
        return {"pdproxy_prompt_tokens_total": counts}

    h = history()
    h.add(0.0, page(5.0, 700.0, 0.0), {})
    h.add(1.0, page(10.0, 700.0, 2.0), {})
    assert h.figures(1.0).prompts == PromptShare(5, {}, {"n": 2})
    h.add(2.0, page(10.0, 703.0, 2.0), {})
    h.add(11.0, page(20.0, 703.0, 2.0), {})
    assert h.figures(11.0).prompts == PromptShare(10, {"short_prompt": 3}, {})


def test_an_engine_that_does_not_answer_has_no_figures_but_its_state() -> None:
    h = history()
    h.add(1.0, proxy_page(), {P0.url: engine_page(), D0.url: engine_page(generated=9, moved=2)})
    h.add(2.0, proxy_page(d_up=0.0), {P0.url: engine_page(), D0.url: None})
    figures = h.figures(2.0)
    assert figures.engines[1] == EngineFigures(D0, False, None, None, None, None)
    assert figures.output_tokens_per_s is None
    assert figures.transfers.count == 2


def test_an_engine_that_was_restarted_counts_from_zero() -> None:
    h = history()
    h.add(1.0, proxy_page(), {D0.url: engine_page(generated=900)})
    h.add(2.0, proxy_page(), {D0.url: None})
    h.add(3.0, proxy_page(), {D0.url: engine_page(generated=20)})
    assert h.figures(3.0).output_tokens_per_s == 10.0


def test_a_proxy_that_does_not_answer_is_told_and_its_last_counts_stay() -> None:
    h = history()
    h.add(1.0, proxy_page(5), {P0.url: engine_page()})
    h.add(2.0, None, {P0.url: engine_page()})
    figures = h.figures(2.0)
    assert not figures.answers
    assert [engine.up for engine in figures.engines] == [None, None]
    assert figures.outcomes["ok"] == 5


def test_trouble_with_kv_is_counted() -> None:
    h = history()
    h.add(1.0, proxy_page(recomputed=64), {D0.url: engine_page(failed=2)})
    transfers = h.figures(1.0).transfers
    assert (transfers.failed, transfers.expired, transfers.recomputed) == (2, 0, 64)


def test_before_the_first_pages_there_is_nothing() -> None:
    figures = history().figures(1.0)
    assert (figures.answers, figures.outcomes, figures.requests_per_s) == (False, {}, None)


def test_figures_are_of_one_moment_though_traffic_goes_on() -> None:
    tally = Tally(3, 2)
    figures = history().figures(1.0, tally)
    tally.sent += 1
    tally.failures["with status 503"] += 1
    assert figures.traffic == Tally(3, 2)
