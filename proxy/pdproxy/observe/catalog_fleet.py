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
_ROLE = Label("role", text="the engine's role")
NODE_INFO = Description(
    "pdproxy_node_info",
    Kind.GAUGE,
    "Always 1; the labels are an engine's role and its pool",
    "bool",
    (NODE, _ROLE, Label("pool", text="the name of its pool")),
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
ADMIN_ENDS = (
    ("done", "answered"),
    ("refused", "it was wrong, had no valid key, or is not possible for the engine (4xx)"),
    ("failed", "it failed in pdproxy itself"),
)
ADMIN_REQUESTS = Description(
    "pdproxy_admin_requests_total",
    Kind.COUNTER,
    "Requests to the admin API (listen.admin)",
    "requests",
    (Label("result", ADMIN_ENDS),),
)
SOURCE_RESULTS = (
    ("changed", "it names other engines than before"),
    ("same", "it names the same engines"),
    ("empty", "it names no engine"),
    ("failed", "there was no answer that can be used: the last one stays in use"),
)


def _of_source(name: str, answers: str, engines: str, age: str) -> tuple[Description, Description, Description]:
    source = Label("source", text="the URL that names engines, as in the settings")
    result = Label("result", SOURCE_RESULTS)
    return (
        Description(f"pdproxy_{name}_answers_total", Kind.COUNTER, answers, "answers", (source, result)),
        Description(f"pdproxy_{name}_engines", Kind.GAUGE, engines, "engines", (source,)),
        Description(f"pdproxy_{name}_age_seconds", Kind.GAUGE, age, "seconds", (source,)),
    )


SOURCE_ANSWERS, SOURCE_ENGINES, SOURCE_AGE = _of_source(
    "source",
    "Answers of sources of engines, such as DNS",
    "Engines that a source names",
    "Time since the last good answer of a source",
)
DNS_ANSWERS, DNS_ENGINES, DNS_AGE = _of_source(
    "dns",
    "Answers of DNS about the names of engines (dns:// and srv://)",
    "Engines that a name stands for",
    "Time since the last good answer about a name",
)
OF_SOURCES = {None: (SOURCE_ANSWERS, SOURCE_ENGINES, SOURCE_AGE), "dns": (DNS_ANSWERS, DNS_ENGINES, DNS_AGE)}
"""The metrics of sources, by their kind. None: of all kinds."""
REPLICAS = Description(
    "pdproxy_replicas", Kind.GAUGE, "Proxies in front of the same engines, with this one (replicas.count)", "proxies"
)
NODE_OTHERS = Description(
    "pdproxy_node_other_requests",
    Kind.GAUGE,
    "Requests that an engine is estimated to have from other replicas, or from others' clients",
    "requests",
    (NODE, _ROLE),
)
