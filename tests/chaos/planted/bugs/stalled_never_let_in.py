"""An engine that is not let in again."""

from tests.chaos.planted.bug import Bug, Change

BUG = Bug(
    what="an engine that stood still gets no requests any more, whatever it shows",
    rules=(
        "each engine serves again",
        "each engine is in use again",
    ),
    changes=(
        Change(
            "fleet/stalls.py",
            """\
        if self._ledger.let_in(engine.url, self._clock.now()):
""",
            """\
        if self._ledger.let_in(engine.url + "/", self._clock.now()):
""",
        ),
    ),
)
