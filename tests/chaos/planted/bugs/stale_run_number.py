"""An engine that was started again, and counts as the run before."""

from tests.chaos.planted.bug import Bug, Change

BUG = Bug(
    what="the number of an engine's run stays when it is started again: what its run before had counts as the new one's",
    rules=("engines that have met have moved KV",),
    changes=(
        Change(
            "scheduling/ledger.py",
            "            node.run_number = self.runs.of(node, evidence)\n",
            "            self.runs.of(node, evidence)\n",
        ),
    ),
    options={"notices": "notifier"},
)
