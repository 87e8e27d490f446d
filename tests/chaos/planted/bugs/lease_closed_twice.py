"""A lease that two owners close."""

from tests.chaos.planted.bug import Bug, Change

BUG = Bug(
    what="an attempt closes the leases that its legs have closed, and the ledger does not see that",
    rules=("leases end",),
    changes=(
        Change(
            "scheduling/ledger.py",
            """\
        if lease.closed:
            return False
""",
            "",
        ),
        Change(
            "serving/dispatch/attempt.py",
            """\
        for lease in self._unused:
""",
            """\
        for lease in self.assignment.leases:
""",
        ),
    ),
)
