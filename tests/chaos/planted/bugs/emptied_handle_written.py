"""A handle whose end has emptied it, in a request."""

from tests.chaos.planted.bug import Bug, Change

BUG = Bug(
    what="a handle that has ended before its decode engine is asked is sent nevertheless, without its params",
    rules=("each body is JSON",),
    changes=(
        Change(
            "serving/kv/custody.py",
            """\
            raise KvGoneError(f"the KV at {self.prefill} is gone")
        lease, expired =""",
            """\
            handle = Handle(b"", None, self.handle.prompt_tokens, self.handle.remote_request_id)
        lease, expired =""",
        ),
        Change("transfer/contract.py", '    if not value:\n        raise ValueError("an empty text is no JSON")\n', ""),
    ),
    options={"notices": "notifier"},
)
