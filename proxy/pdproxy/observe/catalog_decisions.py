"""The metrics of decisions: what a pool's placement has chosen, and why. Only data."""

from __future__ import annotations

from pdproxy.observe.description import NODE, Description, Kind, Label

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

PREDICTION_ERRORS = Description(
    "pdproxy_prediction_error_ratio",
    Kind.GAUGE,
    "How wrong the placement's predictions of the last requests were: (measured - predicted) / predicted",
    "ratio",
    (
        Label("of", (("ttft", "the first token"), ("tpot", "the mean time per token after it"))),
        Label("kind", (("mean", "below 0: it came earlier"), ("size", "the mean size, either way"))),
    ),
)
TIME_CORRECTIONS = Description(
    "pdproxy_time_correction_ratio",
    Kind.GAUGE,
    "What the placement multiplies the times of an engine's profile by, since its answers took longer or shorter",
    "ratio",
    (NODE, Label("work", (("prefill", "computing prompts"), ("step", "steps that only decode")))),
)
KEPT_FOR_PREFILL = Description(
    "pdproxy_engines_kept_for_prefill",
    Kind.GAUGE,
    "Engines of role any that the placement keeps for prefill at present",
    "engines",
)
SHARED_AGE = Description(
    "pdproxy_placement_shared_age_seconds",
    Kind.GAUGE,
    "How long before a worker's placement read it another worker had made the last change of an engine's load",
    "seconds",
)
