"""The book of faults: what they may say, and which request they befall."""

import pytest

from pdproxy_lab.sim.faults.book import FaultBook, PlannedFault, Situation, fault_of, parse
from pdproxy_lab.sim.faults.kind import FaultError
from pdproxy_lab.sim.faults.kinds import KINDS
from tests.sim.raw import COMPLETIONS


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_a_text_form_and_a_default_moment(kind):
    fault = parse(kind)
    assert fault.at == KINDS[kind].moments[0]
    assert fault.args == KINDS[kind].args
    assert fault.next == (None if kind == "refuse" else 1)


def test_a_spec_says_all_that_a_fault_can():
    fault = parse("status@prefilling:next=3,status=503,stream=false,path=/v1/completions,seed=4")
    assert fault == PlannedFault(
        kind="status",
        at="prefilling",
        next=3,
        stream=False,
        path="/v1/completions",
        seed=4,
        args={"status": 503},
    )
    assert parse("reset@mid_stream:rate=0.1").rate == 0.1
    assert fault_of({"kind": "status", "args": {"status": 503}}) == fault_of(
        {"kind": "status", "status": 503}
    )


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ("nonsense", "kind"),
        ("reset@never", "at"),
        ("status@mid_stream", "mid_stream"),
        ("reset:next=0", "next"),
        ("reset:next=x", "next"),
        ("reset:rate=1.5", "rate"),
        ("reset:rate=0", "rate"),
        ("reset:next=1,rate=0.5", "exclude"),
        ("reset:delay=1", "delay"),
        ("reset:next", "KEY=VALUE"),
        ("slow:delay=x", "delay"),
        ("slow:delay=-1", "delay"),
        ("status:status=99", "status"),
        ("garbage:what=xml", "what"),
        ("garbage@after:what=json", "json"),
        ("no_done:stream=false", "whole"),
        ("refuse:next=1", "next"),
        ("reset:events=0", "events"),
        ("reset:next=1,next=2", "next"),
    ],
)
def test_a_fault_that_makes_no_sense_is_refused_by_name(spec, named):
    with pytest.raises(FaultError, match=named) as caught:
        parse(spec)
    assert "\n" not in str(caught.value)


def situation(path=COMPLETIONS, **more):
    return Situation(path=path, generating=path.startswith("/v1/"), **more)


def test_next_counts_requests_and_then_the_fault_is_gone():
    book = FaultBook()
    book.add("reset:next=2")
    assert [len(list(book.due("queued", situation()))) for _ in range(3)] == [1, 1, 0]
    assert not book.armed
    assert book.happened == {"reset@queued": 2}


def test_a_rate_is_drawn_by_seed():
    def drawn(**more):
        book = FaultBook()
        book.add(PlannedFault(kind="reset", rate=0.3, **more))
        return [bool(list(book.due("queued", situation()))) for _ in range(200)]

    assert drawn(seed=1) == drawn(seed=1) != drawn(seed=2)
    assert 30 < sum(drawn(seed=1)) < 90


@pytest.mark.parametrize(
    ("spec", "at", "now"),
    [
        ("reset@head", "queued", situation()),
        ("reset", "queued", situation("/health")),
        ("reset:path=/health", "queued", situation()),
        ("reset", "queued", situation(release=True)),
        ("reset:stream=true", "queued", situation()),
        ("reset:stream=false", "queued", situation(stream=True)),
        ("reset@mid_stream", "mid_stream", situation(stream=True, events=1)),
        ("error_event@queued", "queued", situation()),
        ("status@prefilling", "prefilling", situation(stream=True, head_out=True)),
    ],
)
def test_a_fault_that_does_not_fit_stays_armed(spec, at, now):
    book = FaultBook()
    book.add(spec)
    assert not list(book.due(at, now))
    assert book.armed


def test_filters_let_through_what_they_name():
    book = FaultBook()
    for spec in (
        "reset:path=/health",
        "reset:releases=true",
        "reset:stream=true",
        "reset@mid_stream:events=1",
    ):
        book.add(spec)
    assert list(book.due("queued", situation("/health")))
    assert list(book.due("queued", situation(release=True)))
    assert list(book.due("queued", situation(stream=True)))
    assert list(book.due("mid_stream", situation(stream=True, events=1)))
