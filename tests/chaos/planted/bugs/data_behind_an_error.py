"""Events behind an error event."""

from tests.chaos.planted.bug import Bug, Change

BUG = Bug(
    what="what an engine sends behind an error event is forwarded in front of it",
    rules=("an answer is wrong",),
    changes=(
        Change(
            "serving/stream/event_filter.py",
            """\
                self.failure = error
                break
""",
            """\
                self.failure = error
                continue
""",
        ),
    ),
)
