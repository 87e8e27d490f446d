"""The rows of the table of metrics (`observe.catalog`) about a pool that changes while it serves. Only data."""

from __future__ import annotations

from pdproxy.observe.description import NODE, Description, Kind, Label

CHANGES = (
    ("added", "an engine was added while the proxy runs"),
    ("draining", "it gets no more requests"),
    ("drained", "nothing is left of its requests; it stays until it is undrained or removed"),
    ("undrained", "it gets requests again"),
    ("replaced", "its settings have changed"),
    ("removed", "it was removed"),
)
MEMBER_CHANGES = Description(
    "pdproxy_member_changes_total",
    Kind.COUNTER,
    "Changes of the pool's engines while the proxy runs",
    "changes",
    (Label("change", CHANGES),),
)
NODE_INFO = Description(
    "pdproxy_node_info",
    Kind.GAUGE,
    "Always 1; the labels are an engine's role and its pool",
    "bool",
    (NODE, Label("role", text="the engine's role"), Label("pool", text="the name of its pool")),
)
RELOADS = (
    ("applied", "what has changed is in force, but for what needs a restart"),
    ("unchanged", "nothing has changed"),
    ("refused", "they can't be used: nothing has changed"),
)
RELOADED = Description(
    "pdproxy_settings_reloads_total",
    Kind.COUNTER,
    "How often the settings were read again, because a file has changed or at SIGHUP",
    "reads",
    (Label("result", RELOADS),),
)
