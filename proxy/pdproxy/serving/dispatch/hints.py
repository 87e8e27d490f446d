"""What a client may say of a request besides the request itself, in headers that no engine gets."""

from __future__ import annotations

import msgspec

from pdproxy.scheduling.slo import Slo


class Hints(msgspec.Struct, frozen=True):
    """`slo`: the client's own objective, None if it has none. `session`: what names its
    conversation, None where it says nothing.

    `wants_decision`: whether the answer shows which engines were chosen, and why; `wants_timing`:
    whether it shows where its time went.
    """

    slo: Slo | None = None
    session: str | None = None
    wants_decision: bool = False
    wants_timing: bool = False


NO_HINTS = Hints()
