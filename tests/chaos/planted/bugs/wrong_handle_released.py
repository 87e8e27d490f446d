"""A release that names another request."""

from tests.chaos.planted.bug import Bug, Change

BUG = Bug(
    what="the request that releases KV names a handle that the prefill engine does not know",
    rules=("without faults KV is released",),
    changes=(
        Change(
            "transfer/refusal.py",
            "raw(given.params)",
            'raw(given.params.replace(given.remote_request_id.encode(), b"another"))',
        ),
    ),
)
