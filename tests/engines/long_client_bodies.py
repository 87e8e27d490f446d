"""Bodies of real clients get the plain engine's answer through the proxy, and are placed as they
are expected to be. Runs only if it is named.
"""

import asyncio
import secrets

import pytest

from tests.clients.bodies import SPLIT, Body, load
from tests.clients.placement import CHAT, COMPLETIONS

from .client import ask
from .compare import differs, first_difference
from .engine import MODEL
from .equality import Moved
from .fleet import Fleet
from .proxy import Proxy
from .test_other_routes import content_of

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300, func_only=True)]
LIMIT = 16
SETTLED = 20.0


@pytest.mark.parametrize("body", load(), ids=str)
async def test_a_client_gets_the_plain_engines_answer(
    fleet: Fleet, proxy_1p1d: Proxy, body: Body
) -> None:
    """Status and content are equal; the KV of a body that two engines can serve moved, and the
    proxy counts why one engine served another body.
    """
    # no engine has the prompt in its cache
    sent = body.fitted(MODEL, LIMIT) | {"cache_salt": secrets.token_hex(6)}
    before = Moved.now(fleet, proxy_1p1d, 1)
    plain, other = await asyncio.gather(
        *(ask(one.url, body.route, sent, body.headers) for one in (fleet.plain, proxy_1p1d))
    )
    if body.route in (CHAT, COMPLETIONS):
        assert not differs(plain, other, strict=False)
    else:
        assert (other.status, other.broken) == (plain.status, plain.broken), other.body
        assert not first_difference(content_of(plain), content_of(other))
    split = body.route in SPLIT and plain.status == 200 and not body.alone
    reason = body.alone if body.route in SPLIT and plain.status == 200 else ""
    deadline = asyncio.get_running_loop().time() + SETTLED
    while True:
        moved = before.since(reason)
        right = (moved["alone"], moved["expected_reason"]) == (bool(reason), bool(reason))
        right &= moved["pulled"] == (moved["prompt"] if split else 0)
        if (right and before.released) or plain.status != 200:
            return
        assert asyncio.get_running_loop().time() < deadline, (moved, before.held)
        await asyncio.sleep(0.2)
