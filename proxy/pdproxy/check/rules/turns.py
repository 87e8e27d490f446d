"""Rules about KV that goes back to P with a conversation's next prompt. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from pdproxy.check.facts import CheckFacts
from pdproxy.check.findings import Finding

_OPTION = '"kv_connector_extra_config":{"bidirectional_kv_xfer":true}'


def back(facts: CheckFacts) -> Iterator[Finding]:
    """Engines without the option that the settings rely on, and engines with it that nobody
    uses.
    """
    wanted = facts.settings.pool.turns.bidirectional
    named: set[tuple[str, str]] = set()
    for pair, *_ in facts.asked_pairs():
        last = pair.last
        if last.end != "answered" or not last.kv_moved:
            continue
        code, url, says, remedy = "", "", "", ""
        if wanted and last.back == "nothing":
            code, url = "turns_not_kept", pair.decode
            says = f"turns.bidirectional is set, and decode {url} keeps no KV of its answers"
            remedy = f"start it with {_OPTION} in its --kv-transfer-config"
        elif wanted and last.back == "kept":
            code, url = "turns_not_read", pair.prefill
            says = (
                f"turns.bidirectional is set, and prefill {url} does not react to KV that decode "
                f"{pair.decode} keeps"
            )
            remedy = (
                f"start it with {_OPTION} in its --kv-transfer-config: without it, it never "
                f"answers a prompt with such KV"
            )
        elif not wanted and last.back != "nothing":
            code, url = "turns_unused", pair.decode
            says = (
                f"decode {url} keeps the KV of each answer for minutes (bidirectional_kv_xfer), "
                f"and nobody uses or releases it"
            )
            remedy = "set turns.bidirectional, or start it without that option"
        if code and (code, url) not in named:
            named.add((code, url))
            yield Finding(
                level="error" if wanted else "warning",
                code=code,
                where=(url,),
                says=says,
                remedy=remedy,
            )


RULES = (back,)
