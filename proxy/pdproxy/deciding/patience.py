"""How long a request with a deadline may wait for a place. Pure.

The time that similar requests took lately is the time that the request needs once it has its place.
"""

from __future__ import annotations

from pdproxy.scheduling.admission import RequestDemand
from pdproxy.scheduling.outputs import Outputs
from pdproxy.scheduling.waits import Waits

LEAST_SERVICE = 0.1
"""Seconds: a request that has less left is not begun."""
STANDING = 0.5
"""The part of its spare time that a request may wait, where other requests have been waiting for
long.
"""
LEAST_WAIT = 0.1
"""The part of its whole time that a request may wait in any case. If no request waited where no
request seems to have time, a free place would go to the next request that arrives, whatever the
tenants' weights are.
"""


def may_wait(
    waits: Waits,
    outputs: Outputs,
    demand: RequestDemand,
    now: float,
    left: float,
    queued_since: float | None,
) -> float | None:
    """Return the seconds for which a request may wait, None if it can't be answered in the time
    that is left.

    `left`: the seconds in which it is to be answered; `queued_since`: since when there have always
    been requests that wait, None if none waits.
    """
    usual = outputs.expected(demand.prompt)
    part = 1.0 if demand.limit is None or demand.limit >= usual else max(demand.limit, 1) / usual
    best, surely = waits.service(now, demand.prompt, part)
    if left < max(best, LEAST_SERVICE):
        return None
    spare = left - max(surely, LEAST_SERVICE)
    if queued_since is not None and now > queued_since + surely:
        spare *= STANDING
    return max(spare, left * LEAST_WAIT)
