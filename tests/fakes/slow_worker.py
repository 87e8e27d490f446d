"""A worker process that does what its question says, for as long as it says: run as a module."""

from __future__ import annotations

import os
import time

from pdproxy.kit.pool_process import work


def answer(question: bytes, data: bytes) -> bytes:
    """Echo the data; or do as the question says."""
    match question:
        case b"sleep":
            time.sleep(60)
        case b"until":  # there is a file of that name
            while not os.path.exists(data.strip()):
                time.sleep(0.005)
        case b"die":
            os._exit(1)
        case b"grow":
            return bytes(1 << 40)
        case b"who":
            return str(os.getpid()).encode()
        case b"environment":
            return "\n".join(sorted(os.environ)).encode()
        case b"nice":
            return str(os.nice(0)).encode()
    return data


if __name__ == "__main__":
    work(answer)
