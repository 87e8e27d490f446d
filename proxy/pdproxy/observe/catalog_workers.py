"""The rows of the table of metrics (`observe.catalog`) about workers. Only data."""

from __future__ import annotations

from pdproxy.observe.description import Description, Kind

WORKERS = Description(
    "pdproxy_workers",
    Kind.GAUGE,
    "Workers whose numbers are on this page. Fewer than listen.workers: one is being started, or does not answer",
    "processes",
)
RESTARTS = Description(
    "pdproxy_worker_restarts_total",
    Kind.COUNTER,
    "How often a worker was started again, because it had ended or was killed",
    "starts",
)
