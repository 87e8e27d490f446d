"""The time of creation of merged streams: that of the first event, in every event that has one."""

from __future__ import annotations

from pdproxy.serving.stream.whole_events import CreationTime


def test_all_events_show_the_first_ones_time() -> None:
    time = CreationTime()
    assert time.created is None
    first, second, without = (
        b'data: {"created":7,"a":1}\n\n',
        b'data: {"created":8,"a":2}\n\n',
        b"data: [DONE]\n\n",
    )
    assert [time.put_into(one) for one in (first, second, without, first)] == [
        first,
        b'data: {"created":7,"a":2}\n\n',
        without,
        first,
    ]
    assert time.created == b"7"
