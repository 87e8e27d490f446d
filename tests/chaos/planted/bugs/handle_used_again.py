"""A handle that is sent to an engine after its end."""

from tests.chaos.planted.bug import Bug, Change

BUG = Bug(
    what="a handle that was loaded is released as well: a decode engine is sent it again",
    rules=("each handle ends once",),
    changes=(
        Change(
            "serving/kv/custody.py",
            """\
        self.state, self.how, self.on_gone = None, how, None
""",
            """\
        self.state, self.how, self.on_gone = None if how is not End.LOADED else self.state, how, None
""",
        ),
        Change(
            "serving/kv/custody.py",
            """\
        self._custodian.ended(self, how)
        self.handle = without_params(self.handle)
""",
            """\
        self._custodian.ended(self, how)
""",
        ),
    ),
)
