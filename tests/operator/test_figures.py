"""What the pages of several proxies say together, whatever is on them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy_operator import pages as pages_module
from pdproxy_operator.figures import MAX_LINES, EngineFigures, Figures, add_page, deletion_costs
from pdproxy_operator.pages import AT_ONCE, Pages
from tests.operator.pods import pod
from tests.operator.resources import proxy

FIRST = b"""
# HELP pdproxy_node_info Always 1; the labels are an engine's role
# TYPE pdproxy_node_info gauge
pdproxy_node_info{engine_pod="p-1",node="http://10.0.0.1:8000",pool="m-nixl",revision="a",role="prefill"} 1.0
pdproxy_node_info{engine_pod="d-1",node="http://10.0.0.2:8000",pool="m-nixl",revision="a",role="decode"} 1.0
pdproxy_node_info{engine_pod="",node="http://elsewhere:8000",pool="m-nixl",revision="",role="decode"} 1.0
pdproxy_node_up{node="http://10.0.0.1:8000",role="prefill"} 1.0
pdproxy_node_up{node="http://10.0.0.2:8000",role="decode"} 0.5
pdproxy_node_state{node="http://10.0.0.1:8000",state="up"} 0.0
pdproxy_node_state{node="http://10.0.0.1:8000",state="kv_failing"} 1.0
pdproxy_node_state{node="http://10.0.0.2:8000",state="up"} 1.0
pdproxy_node_state{node="http://10.0.0.2:8000",state="kv_failing"} 0.0
pdproxy_node_inflight{node="http://10.0.0.1:8000",role="prefill"} 3.0
pdproxy_node_inflight{node="http://10.0.0.2:8000",role="decode"} 7.0
pdproxy_node_kv_handles{node="http://10.0.0.1:8000"} 5.0
pdproxy_kv_recomputed_ratio{node="http://10.0.0.2:8000"} 0.0625
pdproxy_demand_replicas{pool="m-nixl",role="prefill"} 1.25
pdproxy_pool_splits{pool="m-nixl"} 1.0
pdproxy_state{state="ok"} 1.0
pdproxy_state{state="degraded"} 0.0
pdproxy_state{state="not_ready"} 0.0
pdproxy_settings_refused 1.0
pdproxy_source_left_out{source="pods://serving:8000/a=b"} 2.0
"""  # noqa: E501 - lines of a page
SECOND = b"""
pdproxy_node_info{engine_pod="d-1",node="http://10.0.0.2:8000",pool="m-nixl",revision="a",role="decode"} 1.0
pdproxy_node_up{node="http://10.0.0.2:8000",role="decode"} 0.0
pdproxy_node_inflight{node="http://10.0.0.2:8000",role="decode"} 1.0
pdproxy_kv_recomputed_ratio{node="http://10.0.0.2:8000"} 0.0
pdproxy_demand_replicas{pool="m-nixl",role="prefill"} 0.5
pdproxy_pool_splits{pool="m-nixl"} 0.0
pdproxy_state{state="ok"} 0.0
pdproxy_state{state="not_ready"} 1.0
pdproxy_settings_refused 0.0
"""  # noqa: E501 - lines of a page


def figures_of(pages: Mapping[str, bytes | None]) -> Figures:
    figures = Figures()
    for name, text in pages.items():
        add_page(figures, name, text)
    return figures


class _Store:
    """Many pods of proxies that are ready."""

    def pods(self, _: str) -> list[Any]:
        labels = {"pdproxy.dev/proxy": "pdproxy"}
        return [pod(f"x-{number}", ready=True, labels=labels) for number in range(5 * AT_ONCE)]


async def test_pages_are_not_kept_until_all_proxies_have_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each may have megabytes."""
    kept, most = 0, 0

    async def metrics(_: str) -> bytes:
        nonlocal kept, most
        kept += 1
        most = max(most, kept)
        await asyncio.sleep(0)
        return FIRST

    def read(figures: Figures, name: str, text: bytes | None) -> None:
        nonlocal kept
        kept -= 1
        add_page(figures, name, text)

    asker = Pages(_Store(), None, lambda _: None)  # type: ignore[arg-type]
    monkeypatch.setattr(asker._admin, "metrics", metrics)
    monkeypatch.setattr(pages_module, "add_page", read)
    await asker._ask(proxy())
    found = asker.figures(proxy())
    assert found is not None
    assert found.answered == 5 * AT_ONCE
    assert most <= AT_ONCE


async def test_proxies_that_nobody_reaches_hold_up_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As behind a network policy of another namespace."""
    silent, other = proxy(), proxy("other")

    class Some(_Store):
        def all_proxies(self) -> list[Any]:
            return [silent, other]

        def pods(self, namespace: str) -> list[Any]:
            last = pod("y-1", ready=True, labels={"pdproxy.dev/proxy": "other"})
            return [*super().pods(namespace) * 12, last]

    async def page(of: Any, _: object) -> bytes | None:
        if of is other:
            return FIRST
        await asyncio.sleep(1)
        return None

    monkeypatch.setattr(pages_module, "EVERY", 0.2)
    asker = Pages(Some(), None, lambda _: None)  # type: ignore[arg-type]
    monkeypatch.setattr(asker, "_page", page)
    running = asyncio.create_task(asker.run())
    async with asyncio.timeout(30):
        while (found := asker.figures(other)) is None or not found.answered:
            await asyncio.sleep(0.01)
        while (unreached := asker.figures(silent)) is None:
            await asyncio.sleep(0.01)
    assert (unreached.answered, unreached.total) == (0, 60 * AT_ONCE)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


def test_what_two_of_four_proxies_say() -> None:
    pages = {"x-1": FIRST, "x-2": SECOND, "x-3": None, "x-4": b"pdproxy_state{"}
    figures = figures_of(pages)
    assert figures == Figures(
        total=4,
        answered=2,
        unreadable=figures.unreadable,
        engines={
            "p-1": EngineFigures("m-nixl", "prefill", known=1, up=1, work=8, fails=1),
            "d-1": EngineFigures("m-nixl", "decode", known=2, up=1, work=8, recomputed=0.0625),
        },
        demand={("m-nixl", "prefill"): 1.75},
        splits={"m-nixl": (1, 2)},
        serving=1,
        refused=["x-1"],
        left_out=2,
    )
    (sentence,) = figures.unreadable
    assert sentence.startswith("/metrics of x-4 has a line not in Prometheus text format: ")
    assert not figures.complete
    assert figures_of({"x-1": FIRST}).complete


def test_the_idlest_are_taken_first() -> None:
    """Those that serve nobody, then those with the least work, KV that is still read included."""
    engines = {
        "down": EngineFigures("m", "decode", known=2, up=0, work=0),
        "idle": EngineFigures("m", "decode", known=2, up=2, work=0),
        "works": EngineFigures("m", "prefill", known=2, up=2, work=3),
        "mad": EngineFigures("m", "prefill", known=2, up=2, work=1 << 40),
    }
    costs = deletion_costs(engines)
    assert sorted(costs, key=costs.__getitem__) == [*engines]
    assert costs["mad"] < 1 << 31, "Kubernetes takes 32 bits"


@pytest.mark.parametrize(
    ("page", "why"),
    [
        (b"pdproxy_state 1\n" * (MAX_LINES + 1), f"more than {MAX_LINES} lines"),
        (b'pdproxy_node_info{a="%b"} 1' % (b"x" * 5000), "more than 4096 bytes in a line"),
        (b"pdproxy_settings_refused NaN", "a value that is not finite"),
        (b"pdproxy_settings_refused 1e999", "a value that is not finite"),
        (b"pdproxy_node_up{node=\xff", "a line not in Prometheus text format"),
    ],
)
def test_a_page_that_cannot_be_read_is_no_answer(page: bytes, why: str) -> None:
    figures = figures_of({"x": page, "y": SECOND})
    assert figures.answered == 1
    assert [why in sentence for sentence in figures.unreadable] == [True]


LINES = [*FIRST.splitlines(), *SECOND.splitlines(), b"pdproxy_node_up -1e30", b"pdproxy_state"]
LINES += [line.rpartition(b" ")[0] + b" 1e308" for line in LINES]


@given(st.lists(st.one_of(st.sampled_from(LINES), st.binary(max_size=30)), max_size=12))
def test_any_page_is_read_or_refused(lines: list[bytes]) -> None:
    figures = figures_of({"x": b"\n".join(lines)})
    assert figures.answered + len(figures.unreadable) == 1
    deletion_costs(figures.engines)
