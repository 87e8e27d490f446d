"""What gives places to requests, and counts what keys use, in a proxy that does both itself."""

from __future__ import annotations

from pdproxy.app.compose import Proxy
from pdproxy.deciding.local_admission import LocalAdmission
from pdproxy.deciding.local_quotas import LocalQuotas


def admission_of(proxy: Proxy) -> LocalAdmission:
    """What gives places."""
    assert isinstance(proxy.admission, LocalAdmission)
    return proxy.admission


def quotas_of(proxy: Proxy) -> LocalQuotas:
    """What counts what keys use."""
    assert isinstance(proxy.quotas, LocalQuotas)
    return proxy.quotas
