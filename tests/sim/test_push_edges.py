"""A prefill engine that pushes: what is said twice, what nobody knows, and what has no KV to
push.
"""

from __future__ import annotations

import pytest

from tests.sim.engines import OTHER, PREFILL, PROMPT, external, plain
from tests.sim.pushes import LEASE, decode, free, meet, prefill, wait
from tests.sim.pushes import facts as facts  # the fixtures use it


def test_a_push_for_a_request_that_nobody_has_is_counted(engines, p, d):
    meet(engines, p, d)
    assert d.core.connector.landed("cmpl-nobody-0-00000000") is None
    assert (d.stats.late_notifications, d.dead) == (1, False)
    prefill(engines, p, "x")
    run = decode(engines, p, d, "x")
    wait(engines)
    assert run.tokens == plain()


def test_a_registration_that_comes_twice_is_one(engines, p, d):
    meet(engines, p, d)
    run = decode(engines, p, d, "x")
    wait(engines, 0.5)
    ((registration, reached),) = p.core.connector.registered.values()
    p.core.connector.take(registration, reached)
    assert p.core.connector.registrations() == [registration.request_id]
    prefill(engines, p, "x")
    wait(engines)
    assert (run.tokens, d.stats.late_notifications) == (plain(), 0)
    assert (free(p), free(d)) == (True, True)


@pytest.mark.parametrize("kv", [{}, dict(PREFILL)], ids=["empty", "prefill"])
def test_a_request_without_p_s_coordinates_registers_nothing(engines, p, d, kv):
    run = decode(engines, p, d, "x", kv=kv)
    wait(engines)
    assert (run.tokens, external(d)) == (plain(), 0)
    assert (p.core.connector.registrations(), d.core.connector.expected) == ([], {})


def test_a_prompt_that_was_not_to_be_pushed_is_not_kept(engines, p, d):
    engines.ask(p, PROMPT, 1, id="cmpl-x-0-aaaaaaaa")
    run = decode(engines, p, d, "x")
    wait(engines, LEASE)
    assert (run.outputs, free(p), len(p.core.connector.registrations())) == ([], True, 1)


@pytest.mark.parametrize("cached", [16, 48, 96])
def test_of_what_d_has_in_part_only_the_end_is_written(engines, p, d, cached):
    """Whole blocks of the beginning."""
    engines.answer(d, (*PROMPT[:cached], *OTHER))
    prefill(engines, p, "x")
    run = decode(engines, p, d, "x")
    wait(engines)
    assert (run.tokens, external(d)) == (plain(), len(PROMPT) - cached)
    assert (free(p), free(d)) == (True, True)
