"""The definitions of PDRuntime and PDProxy, as an API server takes them."""

# The API server checks each object by them, fills in defaults, and `kubectl explain` shows their
# descriptions. Rules are in CEL: tests/kubernetes/long_operator_resources.py shows each sentence.

from __future__ import annotations

from importlib.resources import files

NAMES = ("pdruntimes", "pdproxies")
"""The names of the resources: each has a file."""


def text_of(name: str) -> str:
    """Return the definition of a resource of `NAMES`, as YAML."""
    return files("pdproxy_operator").joinpath("definitions", f"{name}.yaml").read_text()


def text() -> str:
    """Return all definitions as documents of YAML, for `kubectl apply -f -`."""
    return "---\n".join(text_of(name) for name in NAMES)
