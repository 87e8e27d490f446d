"""The rows of the table of metrics (`observe.catalog`) about workers. Only data."""

from __future__ import annotations

from pdproxy.observe.description import Description, Kind

WORKERS = Description(
    "pdproxy_workers",
    Kind.GAUGE,
    "Workers whose numbers are on this page. Fewer than listen.workers: one is being started, or does not answer",
    "processes",
)
UNSHARED = Description(
    "pdproxy_kv_handles_unshared_total",
    Kind.COUNTER,
    "KV handles that had no space in the memory that outlives a worker: if it is killed, their KV is left to its own time",
    "handles",
)
RESTARTS = Description(
    "pdproxy_worker_restarts_total",
    Kind.COUNTER,
    "How often a worker was started again, because it had ended or was killed",
    "starts",
)
