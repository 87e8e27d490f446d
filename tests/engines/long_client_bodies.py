"""Bodies of real clients get the plain engine's answer through the proxy, and are placed as they
are expected to be.
"""

# Runs only if it is named. The bodies that say something about reasoning are sent to engines with a
# parser of it, too.

import asyncio
import json
import re
import secrets
from collections.abc import Iterator

import pytest

from tests.clients.bodies import SPLIT, Body, load
from tests.clients.placement import CHAT, COMPLETIONS

from .client import ask
from .compare import differs, first_difference
from .engine import MODEL, Role
from .equality import Moved
from .fleet import Fleet
from .launcher import Launcher
from .proxy import Proxy
from .test_other_routes import content_of

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300, func_only=True)]
LIMIT = 16
SETTLED = 20.0
NAMES: dict[str, Role] = {"asked": "plain", "asked-p": "prefill", "asked-d": "decode"}
PARSER = "--reasoning-parser deepseek_r1"
BODIES = load()
REASONING = [
    one
    for one in BODIES
    if any(word in json.dumps(one.body) for word in ('"reasoning', '"thinking'))
]
Both = tuple[Fleet, Proxy]
_ADDRESS = re.compile(r"https?://\S+")


@pytest.fixture(scope="module")
def both(
    request: pytest.FixtureRequest, launcher: Launcher, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Both]:
    """One engine of each role with these flags, and pdproxy in front of the pair."""
    engines = Fleet(launcher, flags=request.param)
    try:
        engines.launch(NAMES)
        folder = tmp_path_factory.mktemp("asked")
        proxy = Proxy.start(engines.prefills, engines.decodes, folder)
        yield engines, proxy
        assert proxy.stop() == 0, proxy.tail()
    finally:
        engines.end()


CASES = [("", one) for one in BODIES] + [(PARSER, one) for one in REASONING]


@pytest.mark.parametrize(
    ("both", "body"),
    CASES,
    indirect=["both"],
    scope="module",
    ids=[f"{body}{'-parsed' if flags else ''}" for flags, body in CASES],
)
async def test_a_client_gets_the_plain_engines_answer(both: Both, body: Body) -> None:
    """Status and content are equal; the KV of a body that two engines can serve moved, and the
    proxy counts why one engine served another body.
    """
    engines, proxy = both
    # no engine has the prompt in its cache
    sent = body.fitted(MODEL, LIMIT) | {"cache_salt": secrets.token_hex(6)}
    before = Moved.now(engines, proxy, 1)
    known = proxy.counters().by("pdproxy_alone_total", "reason")
    plain, other = await asyncio.gather(
        *(ask(one.url, body.route, sent, body.headers) for one in (engines.plain, proxy))
    )
    refused = plain.status != 200 or plain.body.startswith(b"event: error")
    if body.route in (CHAT, COMPLETIONS):
        assert not differs(plain, other, strict=False)
    elif refused and plain.streamed:  # the proxy says in a status what an engine says in a stream
        assert other.status >= 400
        said = content_of(plain)[0][1]
        said["error"]["message"] = _ADDRESS.sub("an address", said["error"]["message"])
        assert other.json == said
    else:
        assert (other.status, other.broken) == (plain.status, plain.broken), other.body
        assert not first_difference(content_of(plain), content_of(other))
        assert _cached(other.body) == _cached(plain.body)
    reasons = [body.alone] if body.alone and body.route in SPLIT else []
    known_end = bool(reasons) or not refused  # a refusal may be tried elsewhere first
    split = body.route in SPLIT and not reasons and not refused
    deadline = asyncio.get_running_loop().time() + SETTLED
    while True:
        moved = before.since("")
        alone = proxy.counters().by("pdproxy_alone_total", "reason")
        new = [one for one in alone if alone[one] > known.get(one, 0)]
        right = new == reasons or not known_end
        # a plain engine counts a prompt once for each of its answers
        prompt = moved["prompt"] / (body.body.get("n") or 1)
        right &= moved["pulled"] == (prompt if split else 0)
        if right and before.released:
            return
        assert asyncio.get_running_loop().time() < deadline, (new, moved, before.held)
        await asyncio.sleep(0.2)


def _cached(answer: bytes) -> list[bytes]:
    """The counts of what was in the cache, and of what is new there."""
    return re.findall(rb'"cache[a-z_]*tokens":[0-9]+', answer)
