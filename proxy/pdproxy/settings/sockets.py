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
    """The port on which prefill engines report that KV is ready: a ZMQ socket, with lmcache-mp an HTTP listener.

    It is bound if the connector has such notices; if binding fails, the proxy does not start.
    """

    host: Annotated[
        Host,
        Option(
            "address on which the proxy takes the engines' notices that KV is ready",
            "HOST",
            "--kv-ready-host",
            "--nixl-proxy-host",
        ),
    ] = "127.0.0.1"
    """Address to bind (--kv-ready-host): every prefill rank must reach it. Anybody who reaches it can send notices."""

    port: Annotated[
        Port, Option("TCP port on which the proxy takes these notices", "PORT", "--kv-ready-port", "--nixl-proxy-port")
    ] = 7500
    """TCP port (--kv-ready-port): LMCache's pd_proxy_port. LMCache's own example proxy uses 8500."""

    notifier: Annotated[bool, Option(_notifier, "BOOL", "--kv-notifier")] = False
    """Whether engines of connector nixl have pdproxy's notifier (pdproxy notifier; --kv-notifier true). Then the socket is bound
    for them, too, and the engines report the state of KV."""

    early: bool = False
    """With the notifier: ask the decode engine when the prefill engine's notice arrives, without waiting for its HTTP answer. Not
    measurably faster between engines on CPUs."""

    on_timeout: OnTimeout = "recompute"
    """What happens to a prompt whose notices don't come within deadlines.kv_ready. recompute: the decode engine computes what it
    lacks; fail: the request fails with 504."""


class Registration(Section, frozen=True):
    """The ZMQ socket at which engines register (moriio, p2p-nccl)."""

    host: Annotated[Host, Option(_registration, "HOST", "--registration-host")] = "127.0.0.1"
    """Address to bind (--registration-host): every engine must reach it. Who else reaches it can register an engine before that
    engine does."""

    port: Annotated[
        Port | None,
        Option("TCP port on which they register (default: that of vLLM's examples)", "PORT", "--registration-port"),
    ] = None
    """TCP port (--registration-port): proxy_ping_port (moriio) or proxy_port (p2p-nccl) in the engines' configuration. null: that
    of vLLM's examples, 36367 and 30001."""

    timeout: Seconds = 5.0
    """Without a heartbeat for so many seconds, an engine takes part in no KV transfer. vLLM's engines send one every 3
    seconds."""
