"""A notice of an engine's earlier run, taken for one of its present run."""

from tests.chaos.planted.bug import Bug, Change

BUG = Bug(
    what="the run of a decode engine that has read KV is the one of the moment at which that is known, not of the asking",
    rules=("engines that have met have moved KV",),
    changes=(
        Change(
            "serving/kv/custodian.py",
            "            self.contacts.add(custody.prefill_run, custody.decode_run)",
            """\
            urls = (custody.prefill, custody.decode or "")
            runs = [self._engines[url].node.run_number if url in self._engines else None for url in urls]
            self.contacts.add(*runs)""",
        ),
    ),
    options={"notices": "notifier"},
)
