"""A record that outlives its stream."""

from tests.chaos.planted.bug import Bug, Change

BUG = Bug(
    what="what is kept to go on with a stream counts for ever",
    rules=("gauges go back to 0",),
    changes=(
        Change(
            "serving/dispatch/prompt_request.py",
            """\
            records.drop(record)
""",
            """\
            record.size = 0
""",
        ),
    ),
)
