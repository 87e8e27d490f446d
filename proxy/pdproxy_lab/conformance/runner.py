"""Runs all checks on each pair of engines, one after the other. Owns their deadlines and their
order.

A failure of an engine is a result, not an error.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from msgspec import structs

from pdproxy.app.credentials import Credentials
from pdproxy.app.detection import settled
from pdproxy.check.compatibility import common_model
from pdproxy.check.engines import ask_engine
from pdproxy.check.facts import EngineFacts
from pdproxy.check.http_client import HttpClient
from pdproxy.kit.ids import mint
from pdproxy.settings.engines import ConfiguredEngine
from pdproxy.settings.errors import SettingsError, naming_pool
from pdproxy.settings.schema import Settings
from pdproxy.settings.transfer import pairs_to_try
from pdproxy_lab.conformance.api_client import ApiClient, Endpoint
from pdproxy_lab.conformance.check import Check
from pdproxy_lab.conformance.checks import CHECKS
from pdproxy_lab.conformance.options import ConformanceOptions
from pdproxy_lab.conformance.pair_under_test import PairUnderTest
from pdproxy_lab.conformance.results import PairResults, Report, Result, Verdict, VerdictError
from pdproxy_lab.conformance.stand import settings_for, stand

NO_PAIR = "conformance needs a prefill and a decode engine that work together"


def _mark() -> str:
    return mint()[:12]


async def run_all(
    settings: Settings, options: ConformanceOptions, checks: Sequence[Check] = CHECKS
) -> dict[str, Report]:
    """Test each pool that has a prefill engine, one after the other. Return the reports by the
    pools' names.

    `options.plain` is an engine of the first one. Raises as `run`.
    """
    found: dict[str, Report] = {}
    for at, pool in enumerate(settings.pools):
        if len(settings.pools) > 1 and not any(engine.prefills for engine in pool.nodes):
            continue  # nothing is split there
        own = options if at == 0 else structs.replace(options, plain=None)
        with naming_pool(at, pool.name, pools=len(settings.pools)):
            found[pool.name] = await run(settings.of_pool(pool), own, checks)
    if not found:
        raise SettingsError(NO_PAIR)
    return found


async def run(
    settings: Settings, options: ConformanceOptions, checks: Sequence[Check] = CHECKS
) -> Report:
    """Test the connector of the settings' only pool with its engines. `options.plain` is one of
    these, too.

    Raises:
        SettingsError: there is no pair, or the proxy can't be built or listen with these settings.
    """
    settings = await settled(settings, deadline=options.timeout)
    pairs = pairs_of(settings)
    if not pairs:
        raise SettingsError(NO_PAIR)
    credentials = Credentials(settings)
    http = HttpClient(
        timeout=options.timeout, key=credentials.engine_key, tls=credentials.engine_tls
    )
    # longer than a check's own deadline, whose report says more
    client = ApiClient(options.timeout + 1)

    def at(url: str) -> Endpoint:
        return Endpoint(url, credentials.engine_key(url), credentials.engine_tls(url))

    async def one(prefill: ConfiguredEngine, decode: ConfiguredEngine) -> PairResults:
        # LMCache's sender dies of a request that names no receiver: a prefill engine must not
        # generate alone.
        facts = await asyncio.gather(
            *(ask_engine(http, engine, _mark(), generates=False) for engine in (prefill, decode))
        )
        key = mint()
        narrowed = settings_for(settings, prefill, decode, key, notices=True)
        async with stand(narrowed, key) as running:
            pair = PairUnderTest(
                running, facts[0], facts[1], settings, options, client, http, at, _mark
            )
            pair.model = model_of(facts[0], facts[1])
            results = await _judge(pair, checks)
        return PairResults(prefill=prefill.url, decode=decode.url, results=results)

    try:
        return Report(connector=settings.pool.connector, pairs=[await one(*pair) for pair in pairs])
    finally:
        await client.close()
        await http.close()


def pairs_of(settings: Settings) -> list[tuple[ConfiguredEngine, ConfiguredEngine]]:
    """Return the prefill and decode engines that the settings let work together."""
    return pairs_to_try(settings.pool)


def model_of(prefill: EngineFacts, decode: EngineFacts) -> str:
    """Return the model to ask for, "" if the two have none in common."""
    return common_model(prefill, decode) if prefill.base_names & decode.base_names else ""


async def _judge(pair: PairUnderTest, checks: Sequence[Check]) -> list[Result]:
    results: list[Result] = []
    for check in checks:
        if results and results[0].verdict != "passed":
            says = f"{results[0].name} has not passed"
            results.append(
                Result(name=check.name, does=check.does, verdict="not_judged", says=says)
            )
            continue
        results.append(await _run(pair, check))
    return results


async def _run(pair: PairUnderTest, check: Check) -> Result:
    def result(verdict: Verdict, says: str) -> Result:
        seconds = round(time.monotonic() - begun, 3)
        return structs.replace(empty, verdict=verdict, says=says, seconds=seconds)

    empty = Result(name=check.name, does=check.does, verdict="passed", says="")
    begun = time.monotonic()
    if (why := check.why_not(pair)) is not None:
        return result("not_applicable", why)
    timeout = pair.options.timeout + check.takes(pair)
    pair.activity = ""
    try:
        async with asyncio.timeout(timeout):
            return result("passed", await check.run(pair))
    except TimeoutError:
        return result(
            "failed",
            f"not complete after {timeout:g} s (--timeout), while waiting for "
            f"{pair.activity or 'its end'}",
        )
    except VerdictError as error:
        return result(error.verdict, str(error))
