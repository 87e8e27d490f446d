"""Rules about engines' flags that work and could be better: lease, failure policy, usage details.
Pure.
"""

from __future__ import annotations

from collections.abc import Iterator

from pdproxy.check.facts import CheckFacts
from pdproxy.check.findings import Finding


def lease(facts: CheckFacts) -> Iterator[Finding]:
    """A lease that may end before a decode engine has the handle."""
    deadlines = facts.settings.deadlines
    for engine in facts.by_role("prefill"):
        if engine.lease is not None and engine.lease.ended is not None:
            yield Finding(
                level="warning",
                code="lease_short",
                where=(engine.url,),
                says=f"prefill {engine.url} freed KV {engine.lease.ended:.1f} s after it was "
                f"computed, before it was read",
                remedy="raise kv_lease_duration in kv_connector_extra_config of its "
                "--kv-transfer-config (default: 30 s):"
                " KV that is read after it was freed is wrong without an error, and a handle may "
                "wait for deadlines.connect +"
                f" deadlines.release = {deadlines.connect + deadlines.release:g} s and more",
            )


def policy(facts: CheckFacts) -> Iterator[Finding]:
    """A decode engine that computes a prompt itself if KV can't be loaded: a right answer, but
    nothing reports it.
    """
    for engine in facts.by_role("decode"):
        if engine.policy is not None and engine.policy.answer == "recompute":
            yield Finding(
                level="note",
                code="policy_recompute",
                where=(engine.url,),
                says=f"decode {engine.url} computes a prompt again if its KV can't be loaded "
                f"(kv_load_failure_policy: recompute)",
                remedy="answers stay right, but only pdproxy_kv_moved_total shows it, and a frozen "
                "prefill engine is noticed"
                " after deadlines.first_token; with the policy `fail` (vLLM's default) pdproxy "
                "tries another pair at once",
            )


def details(facts: CheckFacts) -> Iterator[Finding]:
    """No cached tokens in the usage."""
    for engine in facts.by_role("decode", "aggregated"):
        if engine.completions and not any(one.details for one in engine.completions):
            yield Finding(
                level="warning",
                code="prompt_details_off",
                where=(engine.url,),
                says=f"{engine.role} {engine.url} does not report cached tokens: "
                f"usage.prompt_tokens_details is null",
                remedy="start it with --enable-prompt-tokens-details: clients and bills then "
                "include what was cached",
            )


RULES = (lease, policy, details)
