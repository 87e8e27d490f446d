"""All checks in the order in which they run. If the first one does not pass, the others are not
judged.
"""

from __future__ import annotations

from pdproxy_lab.conformance.check import Check
from pdproxy_lab.conformance.checks import answers, handles, kv, leaving, notices

CHECKS: tuple[Check, ...] = (
    *kv.CHECKS,
    *answers.CHECKS,
    *notices.CHECKS,
    *leaving.CHECKS,
    *handles.CHECKS,
    *kv.LAST,
)
