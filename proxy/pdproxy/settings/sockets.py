"""The sections `kv_ready` and `registration`: the sockets at which engines reach the proxy.

Owns names, units, bounds and defaults.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pdproxy.settings.section import Host, Option, Port, Seconds, Section
from pdproxy.transfer import registry

OnTimeout = Literal["recompute", "fail"]


def _notifier() -> str:
    names = ", ".join(entry.name for entry in registry.ENTRIES if "notifier" in entry.options.__struct_fields__)
    return f"whether the engines of connector {names} carry the file of `pdproxy notifier`: true or false"


def _registration() -> str:
    names = " and ".join(entry.name for entry in registry.ENTRIES if entry.registration_port)
    return f"address on which engines register, for {names}"


class KvReady(Section, frozen=True):
    """Where engines send notices that KV is ready: over ZMQ, or over HTTP. It is bound if the connector has such notices."""

    host: Annotated[
        Host,
        Option(
            "address on which the proxy takes the engines' notices that KV is ready",
            "HOST",
            "--kv-ready-host",
            "--nixl-proxy-host",
        ),
    ] = "127.0.0.1"
    """Address to bind: one that every prefill rank can reach. Anybody who can reach it can send notices."""

    port: Annotated[
        Port, Option("TCP port on which the proxy takes these notices", "PORT", "--kv-ready-port", "--nixl-proxy-port")
    ] = 7500
    """TCP port: LMCache's `pd_proxy_port`. Its own example proxy takes 8500."""

    notifier: Annotated[bool, Option(_notifier, "BOOL", "--kv-notifier")] = False
    """Whether engines of connector nixl carry pdproxy's notifier (`pdproxy notifier`). If so, the socket is bound for them."""

    early: bool = False
    """With the notifier: ask the decode engine at the prefill engine's notice, without waiting for its HTTP answer. Between
    engines on CPUs that was not measurably faster."""

    on_timeout: OnTimeout = "recompute"
    """What happens to a prompt whose notices do not come within `deadlines.kv_ready`: an engine computes what is missing, or
    the request fails with 504."""


class Registration(Section, frozen=True):
    """The ZMQ socket at which engines register. It is bound if the connector's engines do that."""

    host: Annotated[Host, Option(_registration, "HOST", "--registration-host")] = "127.0.0.1"
    """Address to bind: one that every engine can reach. Who else can reach it can register an engine before that engine does."""

    port: Annotated[
        Port | None,
        Option("TCP port on which they register (default: that of vLLM's examples)", "PORT", "--registration-port"),
    ] = None
    """TCP port: the `proxy_port` or `proxy_ping_port` in the engines' configuration. None: that of vLLM's examples, 30001 for
    p2p-nccl and 36367 for moriio."""

    timeout: Seconds = 5.0
    """Without a heartbeat for so long, an engine takes part in no KV transfer. vLLM's engines send one every 3 seconds."""
