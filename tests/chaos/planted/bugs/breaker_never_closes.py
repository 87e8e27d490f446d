"""A breaker that stays half-open."""

from tests.chaos.planted.bug import Bug, Change

BUG = Bug(
    what="an engine whose breaker was open gets one request at a time for ever, however good they are",
    rules=("each engine is in use again",),
    changes=(
        Change(
            "scheduling/breakers.py",
            """\
        if lease.proved or lease.trial != node.trial_number or now < node.open_until:
            return
""",
            """\
        if lease.proved or lease.trial <= node.trial_number or now < node.open_until:
            return
""",
        ),
        Change(
            "scheduling/breakers.py",
            """\
        elif now >= node.open_until:
            self._tried(node, now)
""",
            "",
        ),
    ),
)
