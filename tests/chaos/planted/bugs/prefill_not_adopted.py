"""A prefill that nobody awaits."""

from tests.chaos.planted.bug import Bug, Change

BUG = Bug(
    what="the answer to a prefill whose client has left is not awaited: nobody releases the KV that it names",
    rules=("without faults KV is released",),
    changes=(
        Change(
            "serving/dispatch/prefill_leg.py",
            """\
            self._resources.custodian.orphans.adopt(self._pending, record, end)
""",
            """\
            record.nothing_kept("nobody awaits it")
            end()
""",
        ),
    ),
)
