"""Engines that were lost under a request, and do not count."""

from tests.chaos.planted.bug import Bug, Change

BUG = Bug(
    what="a request is tried again however many engines have disappeared under it",
    rules=("one request takes two engines at most",),
    changes=(
        Change(
            "serving/dispatch/engines_lost.py",
            """\
        if not number or number + request.earlier < MOST:
""",
            """\
        if number is not None:
""",
        ),
    ),
)
