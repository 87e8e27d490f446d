"""All checks, in the order in which they are made. The first is the condition of the others."""

from __future__ import annotations

from pdproxy.lab.conformance.check import Check
from pdproxy.lab.conformance.checks import answers, handles, kv, leaving, notices

CHECKS: tuple[Check, ...] = (*kv.CHECKS, *answers.CHECKS, *notices.CHECKS, *leaving.CHECKS, *handles.CHECKS, *kv.LAST)
