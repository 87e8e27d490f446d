"""A deadline that outlives its wait."""

from tests.chaos.planted.bug import Bug, Change

BUG = Bug(
    what="the timer of a wait that has ended in time goes on",
    rules=(
        "no error is logged",
        "timers are cancelled",
    ),
    changes=(
        Change(
            "kit/clock.py",
            """\
        self._timer.cancel()
        self._timer = None
""",
            """\
        self._timer = None
""",
        ),
    ),
)
