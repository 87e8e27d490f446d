"""The rows of the table of metrics (`observe.catalog`) about where engines reach each other. Only data."""

from __future__ import annotations

from pdproxy.observe.description import NODE, Description, Kind, Label


def _counter(name: str, unit: str, text: str, *labels: Label) -> Description:
    return Description(name, Kind.COUNTER, text, unit, labels)


REGISTRATION_RESULTS = (
    ("known", "it registers an engine of the pool, or keeps it registered"),
    ("unknown", "its address is no engine's of the pool"),
    ("contested", "it contradicts the heartbeats of another sender, and is ignored"),
    ("unreadable", "it is no heartbeat"),
    ("not_passed", "there were too many to tell other workers of them"),
    ("expired", "no heartbeat: an engine sent none in registration.timeout"),
)

BOOTSTRAP_QUERIES = _counter(
    "pdproxy_bootstrap_queries_total",
    "questions",
    "Questions to the bootstrap servers of prefill engines",
    NODE,
    Label(
        "result",
        (
            ("complete", "it named all workers of the engine"),
            ("incomplete", "it named a part of them, or they can't be used: see /ready"),
            ("failed", "no answer, or none that can be read"),
        ),
    ),
)

REGISTRATIONS = _counter(
    "pdproxy_registrations_total",
    "heartbeats",
    "Heartbeats by which engines register, by what pdproxy did with them",
    Label("result", REGISTRATION_RESULTS),
)
