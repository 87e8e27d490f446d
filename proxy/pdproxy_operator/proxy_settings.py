"""The settings of a PDProxy's proxies: `pdproxy.yaml`."""

from __future__ import annotations

from pdproxy_operator.names import all_name
from pdproxy_operator.resources import Proxy

PORT = 8000
"""At which proxies listen. Clients use the port of the Service."""


def scheme_of(proxy: Proxy) -> str:
    """Return whether its proxies speak http or https."""
    listen = proxy.spec.config.get("listen")
    tls = listen.get("tls") if isinstance(listen, dict) else None
    return "https" if isinstance(tls, dict) and tls.get("certificate") else "http"


def url_of_all(proxy: Proxy) -> str:
    """Return the URL of the Service that has an address for each proxy, ready or not."""
    return f"{scheme_of(proxy)}://{all_name(proxy.metadata.name)}:{PORT}"
