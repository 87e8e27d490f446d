"""The sections `kv_ready` and `registration`: the sockets at which engines reach the proxy.

Owns names, units, bounds and defaults.
"""

from __future__ import annotations

from typing import Literal

from pdproxy.settings.section import Host, Port, Seconds, Section

OnTimeout = Literal["recompute", "fail"]


class KvReady(Section, frozen=True):
    """Where engines send notices that KV is ready: over ZMQ, or over HTTP. It is bound if the connector has such notices."""

    host: Host = "127.0.0.1"
    """Address to bind: one that every prefill rank can reach. Anybody who can reach it can send notices."""

    port: Port = 7500
    """TCP port: LMCache's `pd_proxy_port`. Its own example proxy takes 8500."""

    notifier: bool = False
    """Whether engines of connector nixl carry pdproxy's notifier (`pdproxy notifier`). If so, the socket is bound for them."""

    early: bool = False
    """With the notifier: ask the decode engine at the prefill engine's notice, without waiting for its HTTP answer. Between
    engines on CPUs that was not measurably faster."""

    on_timeout: OnTimeout = "recompute"
    """What happens to a prompt whose notices do not come within `deadlines.kv_ready`: an engine computes what is missing, or
    the request fails with 504."""


class Registration(Section, frozen=True):
    """The ZMQ socket at which engines register. It is bound if the connector's engines do that."""

    host: Host = "127.0.0.1"
    """Address to bind: one that every engine can reach. Who else can reach it can register an engine before that engine does."""

    port: Port | None = None
    """TCP port: the `proxy_port` or `proxy_ping_port` in the engines' configuration. None: that of vLLM's examples, 30001 for
    p2p-nccl and 36367 for moriio."""

    timeout: Seconds = 5.0
    """Without a heartbeat for so long, an engine takes part in no KV transfer. vLLM's engines send one every 3 seconds."""
