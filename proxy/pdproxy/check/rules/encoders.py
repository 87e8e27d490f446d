"""Rules about encoder engines: do they encode, and can other engines use their outputs? Pure."""

from __future__ import annotations

from collections.abc import Iterator

from pdproxy.check.facts import CheckFacts, EngineFacts
from pdproxy.check.findings import Finding
from pdproxy.transfer.encoders import CONTRACTS


def outputs(facts: CheckFacts) -> Iterator[Finding]:
    """An encoder engine whose answer to a picture is of no use, or that does more than encode."""
    for engine in _encoders(facts):
        encoding, name = engine.encoding, f"encode {engine.url}"
        if encoding is None:
            continue
        if encoding.why_not:
            yield Finding(
                level="error",
                code="encodes_nothing",
                where=(engine.url,),
                says=f"{name} was sent a picture, and no other engine can use its answer: "
                f"{encoding.why_not}",
                remedy="start it with a model that takes pictures, and with the "
                "--ec-transfer-config of an encoder engine for ec_connector "
                f"{facts.settings.pool.ec_connector} (docs/guide/models.md)",
            )
        elif encoding.tokens:
            yield Finding(
                level="warning",
                code="encoder_generates",
                where=(engine.url,),
                says=f"{name} generated a token for a picture: it computes the whole model, and "
                "keeps KV",
                remedy="it works; ec_role ec_producer in its --ec-transfer-config, in place of "
                "ec_both, makes it an encoder alone",
            )


def models(facts: CheckFacts) -> Iterator[Finding]:
    """An encoder engine with another model than an engine that uses its outputs."""
    wanted = {name for engine in _consumers(facts) for name in engine.base_names}
    for engine in _encoders(facts):
        if engine.base_names and not wanted <= engine.base_names:
            yield Finding(
                level="error",
                code="encoder_models_differ",
                where=(engine.url,),
                says=f"encode {engine.url} serves {'+'.join(sorted(engine.base_names))}, and the "
                f"engines that use its outputs serve {'+'.join(sorted(wanted))}",
                remedy="start all with one model and the same --served-model-name: an encoder "
                "engine gets no request for another model",
            )


def versions(facts: CheckFacts) -> Iterator[Finding]:
    """An encoder engine with another version of vLLM than an engine that uses its outputs."""
    compares = CONTRACTS[facts.settings.pool.ec_connector].compares_versions
    for engine in _encoders(facts):
        others = [one for one in _consumers(facts) if one.version != engine.version]
        if not others:
            continue
        named = ", ".join(f"{one.version or 'unknown'} on {one.role} {one.url}" for one in others)
        yield Finding(
            level="error" if compares else "warning",
            code="encoder_versions_differ",
            where=(engine.url, *(one.url for one in others)),
            says=f"encode {engine.url} runs vLLM {engine.version or 'unknown'}, and engines that "
            f"use its outputs run another version: {named}",
            remedy="install the same version everywhere: "
            + (
                "the others refuse its outputs, and encode all pictures themselves"
                if compares
                else "outputs of another version may be found under another name, or be wrong"
            ),
        )


def _encoders(facts: CheckFacts) -> list[EngineFacts]:
    return [one for one in facts.engines if one.role == "encode" and one.could_be_asked]


def _consumers(facts: CheckFacts) -> list[EngineFacts]:
    """Return the engines that use outputs."""
    return facts.by_role("prefill", "aggregated")


RULES = (outputs, models, versions)
