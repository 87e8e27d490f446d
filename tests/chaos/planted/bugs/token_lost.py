"""A token that is lost where another engine goes on."""

from tests.chaos.planted.bug import Bug, Change

BUG = Bug(
    what="what the engine that goes on has sent before its stream flows does not reach the client",
    rules=("an answer is wrong",),
    changes=(
        Change(
            "serving/stream/relay.py",
            """\
        batch = self._held.take()
        if batch:
""",
            """\
        batch = self._held.take()
        if batch and not hasattr(output, "is_broken"):
""",
        ),
    ),
)
