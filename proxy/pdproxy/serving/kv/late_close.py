"""Closing the leg of a decode engine that may wait for KV.

Most engines free a closed request's blocks once its KV has come. Some never do
(`Holder.loses_closed`): their leg stays open until the KV must have come, `KV_GRACE` after the
prefill engine's answer, or until it is known that there will be none.
"""

from __future__ import annotations

from functools import partial

from pdproxy.serving.kv.custody import Custody
from pdproxy.upstream.connection import Leg

KV_GRACE = 1.0
"""Seconds from the prefill engine's answer to the end of its write into the decode engine's
blocks.
"""


def close(leg: Leg, custody: Custody | None) -> None:
    """Close a leg that has shown no data, now or later."""
    if custody is None or not custody.loses_closed:
        leg.close()
    else:
        custody.when_over(partial(leg.let_finish, KV_GRACE))
