"""What happens in a run: calls of clients and faults, as one list of items.

Each item draws from a source of its own, made of the seed and its number: leaving one out changes
no other. Pure.
"""

from __future__ import annotations

import random
from typing import Literal

import msgspec

from tests.chaos.access import Credentials, drawn
from tests.chaos.options import Options
from tests.chaos.oracle import BODIES
from tests.chaos.setup import places

Client = Literal["plain", "kept", "leaves", "resets", "reads_slowly", "sends_slowly", "pipelines"]
_CLIENTS: dict[Client, int] = {
    "plain": 60, "kept": 10, "leaves": 8, "resets": 6, "reads_slowly": 6, "sends_slowly": 4,
    "pipelines": 6,
}  # fmt: skip
"""How often clients are of each kind."""
Trouble = Literal[
    "arm",
    "restart",
    "kill",
    "terminate",
    "freeze",
    "core_freeze",
    "dead_core",
    "cut",
    "half_cut",
    "slow_link",
    "remove",
    "api_restart",
    "slow_connect",
]
_TROUBLES: dict[Trouble, int] = {
    "arm": 60, "restart": 6, "kill": 6, "terminate": 5, "freeze": 6, "core_freeze": 6,
    "dead_core": 4, "cut": 4, "half_cut": 3,
    "slow_link": 4, "remove": 2, "api_restart": 5, "slow_connect": 4,
}  # fmt: skip
ANSWERS = {
    "D": (
        *(
            "reset@queued",
            "reset@head",
            "reset@mid_stream",
            "eof@mid_stream",
            "half_chunk@mid_stream",
            "eof@queued",
        ),
        *(
            "error_event@before_first_token",
            "error_event@mid_stream",
            "abort_finish@mid_stream",
            "no_done@before_done",
        ),
        *("abort_finish@before_first_token", "text_after_error@mid_stream"),
        *(
            "status@queued",
            "empty_body@queued",
            "empty_stream@queued",
            "load_failure@handed_over",
            "slow@queued",
        ),
        *(
            "split@queued",
            "join@queued",
            "stall@mid_stream",
            "stall@head",
            "reset@handed_over",
            "garbage@queued",
        ),
        *(
            "reset@accept",
            "stall@accept",
            "eof@last_chunk",
            "reset@after",
            "dead_core@mid_stream",
            "half_chunk@head",
        ),
    ),
    "P": (
        *(
            "reset@queued",
            "reset@handed_over",
            "eof@last_chunk",
            "half_chunk@last_chunk",
            "status@queued",
        ),
        *(
            "stall@queued",
            "stall@handed_over",
            "slow@queued",
            "split@queued",
            "empty_body@queued",
            "garbage@queued",
        ),
        *(
            "reset@accept",
            "stall@accept",
            "lease_expiry@after",
            "reset@after",
            "dead_core@prefilling",
        ),
    ),
}
ANSWERS["V"] = tuple(
    one for one in ANSWERS["P"] if not one.startswith("lease") and "@handed_over" not in one
)
ANSWERS["E"] = tuple(dict.fromkeys((*ANSWERS["P"], *ANSWERS["D"])))
"""Faults of answers, by the first letter of an engine's name: what the simulator calls them."""
NOTICES = ("late_notice@notice", "late_notice@notice", "lost_notice@notice", "double_notice@notice")
"""Faults of the notices of engines that have the notifier."""


_NOTICE_SHARE = 0.3
_DELAYS = (0.002, 0.02, 0.1, 0.6, 3.0)


class Call(msgspec.Struct, frozen=True, tag="call"):
    """A client comes. `amount`: of bytes after which it leaves, or of seconds between its reads or
    writes.
    """

    number: int
    at: float
    client: Client
    bodies: tuple[int, ...]
    amount: float
    sender: Credentials = Credentials()

    def words(self) -> str:
        """Return what it is, in words."""
        more = f" ({self.amount:g})" if self.client not in ("plain", "kept", "pipelines") else ""
        sender = f", {words}" if (words := self.sender.words()) else ""
        return (
            f"at {self.at:.3f} s a client {self.client}{more}{sender}: request "
            f"{', '.join(map(str, self.bodies))}"
        )


class Fault(msgspec.Struct, frozen=True, tag="fault"):
    """Something goes wrong with an engine, for `seconds`. `other`: the far end of a link, an engine
    or the proxy.
    """

    number: int
    at: float
    what: Trouble
    engine: str
    seconds: float
    other: str = ""
    spec: str = ""

    def words(self) -> str:
        """Return what it is, in words."""
        what = self.spec or self.what
        to = f" to {self.other}" if self.other else ""
        return f"at {self.at:.3f} s {self.engine}{to}: {what}" + (
            "" if self.spec else f" for {self.seconds:.3f} s"
        )


Item = Call | Fault


def schedule(options: Options) -> list[Item]:
    """Return the items of a run in the order of their times. Calls have the lower numbers."""
    calls, faults = round(options.rate * options.seconds), round(options.faults * options.seconds)
    numbers = range(calls + faults)
    made = [
        _call(number, options) if number < calls else _fault(number, options)
        for number in numbers
        if options.only is None or number in options.only
    ]
    return sorted(made, key=lambda item: (item.at, item.number))


def _call(number: int, options: Options) -> Call:
    chance = random.Random(f"{options.seed}/{number}")
    at = chance.uniform(0, options.seconds)
    (client,) = chance.choices(list(_CLIENTS), list(_CLIENTS.values()))
    count = {"kept": 3, "pipelines": 2}.get(client, 1)
    amount = {
        "leaves": float(chance.choice((0, 1, 200, 400, 1000, 2000))),
        "resets": float(chance.choice((0, 1, 200, 400, 1000, 2000))),
        "reads_slowly": chance.choice((0.05, 0.3, 3.0)),
        "sends_slowly": chance.choice((0.05, 0.3, 3.0)),
    }.get(client, 0.0)
    bodies = tuple(chance.randrange(BODIES) for _ in range(count))
    return Call(number, at, client, bodies, amount, drawn(chance))


def _fault(number: int, options: Options) -> Fault:
    chance = random.Random(f"{options.seed}/{number}")
    at = chance.uniform(0, options.seconds)
    engines = [one.name for one in places(options)]
    (what,) = chance.choices(list(_TROUBLES), list(_TROUBLES.values()))
    engine = chance.choice(engines)
    seconds = chance.choice((0.1, 0.5, 1.5, 4.0, 8.0)) * chance.uniform(0.8, 1.2)
    if what == "arm":
        notices = NOTICES if options.notices != "none" and chance.random() < _NOTICE_SHARE else ()
        spec = chance.choice(notices or ANSWERS[engine[0]])
        extra = [f"next={chance.randint(1, 2)}"]
        if spec in NOTICES:
            extra = [f"next={chance.randint(2, 12)}"]
        if spec == NOTICES[0]:
            extra.append(f"delay={chance.choice(_DELAYS)}")
        if spec.endswith("@mid_stream"):
            extra.append(f"events={chance.randint(1, 8)}")
        return Fault(number, at, what, engine, seconds, spec=f"{spec}:{','.join(extra)}")
    if what in ("cut", "half_cut", "slow_link"):
        other = chance.choice(
            [
                "proxy",
                *(
                    one
                    for one in engines
                    if one[0] != engine[0] or (one[0] == "E" and one != engine)
                ),
            ]
        )
        return Fault(number, at, what, engine, seconds, other)
    return Fault(number, at, what, engine, seconds)
