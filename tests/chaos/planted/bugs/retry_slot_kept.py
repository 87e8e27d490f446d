"""A place of the retry budget that is not given back."""

from tests.chaos.planted.bug import Bug, Change

BUG = Bug(
    what="an attempt behind the first one keeps its place in the retry budget",
    rules=("gauges go back to 0",),
    changes=(
        Change(
            "serving/dispatch/prompt_request.py",
            """\
            self.slot.leave()
""",
            "",
        ),
    ),
)
