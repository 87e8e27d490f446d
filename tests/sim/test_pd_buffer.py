"""The PD buffer of a decode engine alone: who gets allocation, who waits, who is refused."""

import pytest

from pdproxy_lab.sim.facts import LMCacheFacts
from pdproxy_lab.sim.pd_buffer import Allocation, ChunkBatch, PDBuffer

PAGES = ((7, (1, 2)),)


class Buffer(PDBuffer):
    """A buffer that keeps its answers, by request."""

    def __init__(self, chunks=4, **config):
        super().__init__(LMCacheFacts(**config), chunks)
        self.answers = {}

    def push(self, request, keys, total=None, last=True, now=0.0):
        """Offer a batch; `keys`: a letter a chunk."""
        batch = ChunkBatch(request, tuple(keys), (PAGES,) * len(keys), total or len(keys), last)
        self.offer(
            batch, now, lambda allocation: self.answers.setdefault(request, []).append(allocation)
        )
        return self.answers.get(request, [None])[-1]


def test_room_is_given_and_what_is_there_is_named():
    buffer = Buffer()
    assert buffer.push("r", "ab") == Allocation()
    assert buffer.push("s", "bc") == Allocation(present=("b",))
    assert sorted(buffer.held) == ["a", "b", "c"]


def test_what_has_room_is_found_before_it_is_written():
    buffer = Buffer()
    buffer.push("r", "ab")
    assert buffer.has("a")
    buffer.write(["a"], [PAGES])
    assert buffer.take("a", 0) == PAGES
    assert buffer.take("b", 0) is None
    assert not buffer.held


def test_as_many_reads_as_pushes_free_a_chunk():
    buffer = Buffer()
    buffer.push("r", "a")
    buffer.push("s", "a")
    buffer.take("a", 0)
    assert buffer.has("a")
    buffer.take("a", 0)
    assert not buffer.has("a")


def test_a_read_lets_the_next_one_in():
    buffer = Buffer(2)
    buffer.push("r", "ab")
    assert buffer.push("s", "c") is None
    assert buffer.waiting == 1
    buffer.take("a", 1.0)
    assert buffer.answers["s"] == [Allocation()]


def test_async_who_fits_passes_who_doesn_t():
    buffer = Buffer(3)
    buffer.push("r", "ab")
    assert buffer.push("big", "cd") is None
    assert buffer.push("small", "e") == Allocation()


def test_sync_nobody_passes():
    buffer = Buffer(3, pd_backend_mode="sync")
    buffer.push("r", "ab")
    assert buffer.push("big", "cd") is None
    assert buffer.push("small", "e") is None
    buffer.take("a", 0)
    assert buffer.answers["big"] == [Allocation()]
    assert "small" not in buffer.answers


def test_a_reservation_keeps_others_out_until_the_last_batch():
    buffer = Buffer(4)
    assert buffer.push("r", "a", total=3, last=False) == Allocation()
    assert buffer.push("s", "xy") is None
    assert buffer.push("r", "bc", total=3) == Allocation()
    assert buffer.answers.get("s") is None  # it is admitted now, but there is no room
    buffer.take("a", 0)
    assert buffer.answers["s"] == [Allocation()]


def test_waiting_for_a_reservation_ends_with_a_refusal():
    buffer = Buffer(4, pd_allocation_timeout_sec=2.0)
    buffer.push("r", "a", total=3, last=False)
    buffer.push("s", "xy", now=1.0)
    assert buffer.next_timer() == 3.0
    buffer.tick(2.9)
    assert buffer.answers.get("s") is None
    buffer.tick(3.0)
    assert buffer.answers["s"] == [Allocation(refused=True)]


def test_waiting_for_room_ends_with_a_refusal_that_takes_all_back():
    buffer = Buffer(3, pd_allocation_timeout_sec=2.0)
    buffer.push("other", "xy")
    buffer.push("r", "a", total=3, last=False)
    buffer.push("r", "bc", total=3)
    buffer.tick(2.0)
    assert buffer.answers["r"] == [Allocation(), Allocation(refused=True)]
    assert sorted(buffer.held) == ["x", "y"]


@pytest.mark.parametrize("total", [0, 5])
def test_what_can_never_fit_is_refused_at_once(total):
    buffer = Buffer(4)
    buffer.offer(
        ChunkBatch("r", ("a",), (PAGES,), total, False),
        0.0,
        lambda allocation: buffer.answers.setdefault("r", [allocation]),
    )
    assert buffer.answers["r"] == [Allocation(refused=True)]


def test_more_chunks_than_were_said_are_refused_and_taken_back():
    buffer = Buffer(8)
    buffer.push("r", "ab", total=3, last=False)
    assert buffer.push("r", "abc", total=3) == Allocation(refused=True)
    assert not buffer.held


def test_a_push_that_is_given_up_leaves_nothing():
    buffer = Buffer(4)
    buffer.push("r", "ab", total=4, last=False)
    assert buffer.push("s", "c") is None
    buffer.cancel("r", ["a", "b"], 0.0)
    assert buffer.answers["s"] == [Allocation()]
    assert list(buffer.held) == ["c"]


def test_sync_knows_no_reservations():
    buffer = Buffer(4, pd_backend_mode="sync")
    assert buffer.push("r", "a", total=99, last=False) == Allocation()
    assert buffer.push("s", "xyz") == Allocation()
    assert buffer.next_timer() is None
