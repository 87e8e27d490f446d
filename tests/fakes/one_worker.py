"""Tests that need a proxy of one process, and why. With PDPROXY_TEST_WORKERS=2 they are left out, and counted by their reason."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

EACH = "it counts lines of the log about files, which each worker follows by itself"
KEPT = "it counts connections to engines, which each worker keeps for itself"
SHARES = "it is about tenants' shares while requests wait, which hold in each worker"

ONE_WORKER: Mapping[str, str] = MappingProxyType(
    {
        "test_decode_fails.py::test_a_kept_connection_that_the_engine_had_closed": KEPT,
        "test_decode_fails.py::test_connections_are_kept_and_closed_as_the_engine_says": KEPT,
        "test_keys.py::test_a_file_that_goes_bad_changes_nothing_and_is_told_once": EACH,
        "test_tenants.py::test_places_are_divided_by_weight": SHARES,
        "test_tenants.py::test_weights_of_the_settings": SHARES,
        "test_tenants.py::test_priority_orders_the_requests_of_one_tenant": SHARES,
        "test_tenants.py::test_a_key_bounds_the_priorities_of_its_requests": SHARES,
        "test_tenants.py::test_on_routes_of_one_engine_only_the_header_is_read": SHARES,
        "test_tls.py::test_a_certificate_that_expires_is_reported": EACH,
        "test_tls.py::test_half_of_a_renewal_changes_nothing": EACH,
    }
)
"""Reasons by the test's file and name. All parameters of a test are left out."""


def reason(file: str, name: str) -> str | None:
    """Return why a test needs one worker, None if it does not."""
    return ONE_WORKER.get(f"{file}::{name}")
