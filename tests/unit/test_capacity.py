"""Windows of engines: when they begin, shrink and grow, and what they allow a pool."""

from __future__ import annotations

from pdproxy.scheduling.capacity import FEW, Load, Windows


def d(requests: int, url: str = "d") -> Load:
    return Load(url, requests)


def p(requests: int, url: str = "p") -> Load:
    return Load(url, requests, prefills=True)


def test_an_engine_without_signs_has_no_window() -> None:
    """Nor one that reports nothing: it can't be seen to be full."""
    windows = Windows()
    for waiting in (None, 0.0, 1.0, 5.0):
        for _ in range(5):
            windows.seen(d(50), waiting, 0.5)
    assert windows.of(d(50)) is None
    assert windows.places([d(50)], 50) is None


def test_many_waiting_requests_twice_in_a_row_are_a_sign() -> None:
    """Once is a burst. What has not waited stays allowed."""
    windows = Windows()
    windows.seen(d(100), 40.0, 0.5)
    windows.seen(d(100), 0.0, 0.5)
    windows.seen(d(100), 40.0, 0.5)
    assert windows.of(d(100)) is None
    windows.seen(d(100), 10.5, 0.5)
    assert windows.of(d(100)) == 89.5
    windows.seen(d(89), 80.0, 0.5)
    assert windows.of(d(89)) == 44.5, "half at most: much of what waits may be about to run"


def test_a_full_cache_is_a_sign() -> None:
    windows = Windows()
    windows.seen(d(10), 0.0, 0.95)
    assert windows.of(d(10)) == 10.0, "those that run fit"
    windows.seen(d(10), 5.0, 0.95)
    assert windows.of(d(10)) == 5.0
    windows.seen(d(0), 0.0, 1.0)
    assert windows.of(d(0)) == 1.0


def test_an_engine_that_refuses_gets_less_at_once() -> None:
    windows = Windows()
    windows.refused(d(40))
    assert windows.of(d(40)) == 40.0
    windows.refused(d(20))
    assert windows.of(d(20)) == 20.0


def test_a_refusal_by_an_engine_that_has_little_of_ours_shows_nothing() -> None:
    """Others may have filled its queue, and it may have room again at once: a window of one would
    last for a minute.
    """
    windows = Windows()
    for requests in (0, 1, FEW):
        windows.refused(d(requests))
        assert windows.of(d(requests)) is None
    windows.refused(d(40))
    windows.refused(d(1))
    assert windows.of(d(1)) == 40.0


def test_a_window_grows_only_when_it_is_used() -> None:
    """And while nothing waits and there is KV left."""
    windows = Windows()
    windows.refused(d(40))
    for load, waiting, usage in ((d(39), 0.0, 0.1), (d(40), 0.0, 0.85), (d(40), 30.0, 0.1)):
        windows.seen(load, waiting, usage)
        assert windows.of(d(40)) == 40.0
    windows.seen(d(40), 0.0, 0.1)
    assert windows.of(d(40)) == 42.0
    windows.seen(d(42), 4.0, 0.1)
    assert windows.of(d(42)) == 42 * 1.05


def test_a_simulated_engine_is_kept_full_without_a_queue() -> None:
    """It runs 100 at once. The window comes near that from a load of 1000, and stays there."""
    windows, found = Windows(), []
    for _ in range(200):
        window = windows.of(d(0))
        requests = 1000 if window is None else int(min(window, 1000))
        windows.seen(d(requests), max(requests - 100, 0), min(requests, 100) / 130)
        found.append(requests)
    assert found[0] == 1000
    assert all(95 <= one <= 125 for one in found[10:])


def test_the_pool_is_the_sum_of_engines_that_answer() -> None:
    """As soon as each has a window; never nothing."""
    windows = Windows()
    windows.refused(d(10, "a"))
    assert windows.places([d(10, "a"), d(10, "b")], 20) is None
    windows.refused(d(9, "b"))
    assert windows.places([d(10, "a"), d(9, "b")], 19) == 19
    assert windows.places([d(10, "a")], 19) == 10
    assert windows.places([], 5) is None, (
        "requests are refused for want of an engine, not of a place"
    )
    windows.forget("a")
    windows.forget("unknown")
    assert windows.places([d(10, "a")], 17) is None
    windows.seen(d(0, "c"), 0.0, 1.0)
    assert windows.places([d(0, "c")], 0) == 1


def test_prefill_engines_bound_the_requests_that_are_prefilled() -> None:
    """Those that are decoded already take nothing of them."""
    windows = Windows()
    windows.seen(p(50), 10.0, 0.1)
    windows.seen(p(50), 10.0, 0.1)
    assert windows.of(p(50)) == 40.0
    assert windows.places([p(50), d(120)], 120) == 110
    windows.refused(d(100))
    assert windows.places([p(50), d(100)], 120) == 100


def test_fixed_windows() -> None:
    """For each engine that answers, whatever it reports."""
    windows = Windows(20)
    windows.seen(d(100), 90.0, 1.0)
    windows.refused(d(100))
    assert windows.places([p(50), d(20, "a"), d(0, "b")], 20) == 40
