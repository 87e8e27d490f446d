"""The causes for which requests are slow although none fails: their words, which `/ready`, the
admin API and the alerts share, and how many of them `/ready` names.
"""

from __future__ import annotations

from typing import NamedTuple

from pdproxy.observe.description import Label, MergeRule, gauge


class Cause(NamedTuple):
    """A cause. `name`: the value of the metric's label; `words`: how a sentence on it begins."""

    name: str
    words: str
    meaning: str


PREFILL = Cause(
    "slow_prefill",
    "slow prefill engine",
    "a prefill engine takes much longer for its prompts than another one",
)
LINK = Cause(
    "slow_link",
    "slow KV transfer",
    "KV takes long from a prefill engine to a decode engine at which no request waits for a place",
)
QUEUE = Cause(
    "decode_queue",
    "queue at the decode engine",
    "requests wait for a place in a decode engine",
)
FULL = Cause(
    "decode_full",
    "full KV at the decode engine",
    "requests wait for KV blocks of a decode engine",
)
CLIENTS = Cause(
    "slow_clients",
    "slow clients",
    "many clients read their answers too slowly, in one process",
)
LOOP = Cause("loop_held", "event loop held", "the event loop of a process is late too often")
RECOMPUTED = Cause(
    "recomputed",
    "prompts computed again",
    "a decode engine did not get KV that it was sent, since its start",
)
MOVES_NOT = Cause(
    "kv_does_not_move",
    "KV does not move",
    "KV does not get from or to an engine, or from one to another: prompts are computed whole",
)
CAUSES = (PREFILL, LINK, QUEUE, FULL, CLIENTS, LOOP, RECOMPUTED, MOVES_NOT)
PROBLEMS = gauge(
    "pdproxy_problems",
    "problems",
    "How many problems /ready names that make requests slow, by their cause; of several workers, "
    "the most that one names",
    Label("cause", tuple((one.name, one.meaning) for one in CAUSES)),
    workers=MergeRule.MOST,
)
