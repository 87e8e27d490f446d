"""Whether the proxy would pair two engines, so that the check may try them. Pure.

The check sends a request through a pair only if the proxy would: KV for blocks of another size, or
of a longer prompt, kills a decode engine.
"""

from __future__ import annotations

from pdproxy.check.facts import EngineFacts


def why_incompatible(prefill: EngineFacts, decode: EngineFacts) -> str:
    """Return why no request may be sent through this pair, "" if one may."""
    for engine in (prefill, decode):
        if engine.trouble is not None:
            return f"the {engine.role} engine could not be asked"
        if engine.is_proxy:
            return f"the {engine.role} URL is not an engine"
        if engine.no_output:
            return f"the {engine.role} engine does not generate"
    if (difference := prefill.evidence().difference(decode.evidence())) is not None:
        return difference
    if not prefill.base_names & decode.base_names:
        return "no base model in common"
    if decode.block_size is None:
        return "their KV block size is not known"
    return ""


def common_model(prefill: EngineFacts, decode: EngineFacts) -> str:
    """Return the model to ask both for."""
    return min(prefill.base_names & decode.base_names)
