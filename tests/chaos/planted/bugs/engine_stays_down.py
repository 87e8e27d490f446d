"""An engine that stays down after a restart."""

from tests.chaos.planted.bug import Bug, Change

BUG = Bug(
    what="an engine that has served before and went down is not marked as up by its probes",
    rules=(
        "each engine serves again",
        "each engine is in use again",
    ),
    changes=(
        Change(
            "scheduling/ledger.py",
            "        node.evidence, node.down_because, node.probed = evidence, None, True\n",
            """\
        if not was_down or node.evidence is None:
            node.down_because = None
        node.evidence, node.probed = evidence, True
""",
        ),
    ),
)
