"""The metrics of decisions: what a pool's placement has chosen, and why. Only data."""

from __future__ import annotations

from pdproxy.observe.description import Description, Kind, Label

CHOICES = (
    ("whole", "one engine serves the request"),
    ("split", "a prefill and a decode engine share the work"),
    ("refused", "503: no engine can serve it in time (policy.refuse_late)"),
)
MAX_REASONS = 32
"""How many reasons are labels. Further ones are counted as "other": a placement has a few."""

DECISIONS = Description(
    "pdproxy_decisions_total",
    Kind.COUNTER,
    "Decisions of the pool's placement (policy.placement); a request has one for each attempt",
    "decisions",
    (Label("choice", CHOICES), Label("reason", text="the placement's reason, one of a few words of its own; or late")),
)
