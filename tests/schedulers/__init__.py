"""vLLM's own connector schedulers and the simulator's connectors, asked the same.

`real.py` runs in the engines' environment; it imports vLLM and nothing of pdproxy.
`real_matching.py` and `real_moriio.py` do the same with parts of workers, `real_ec.py` with the
schedulers of EC connectors, whose scripts are in `long_ec.py`. `scripts.py` makes the
scripts, `simulated.py` has the simulator follow them, `compare.py` runs both. One file
`long_NAME.py` per connector says which class of vLLM it is compared with, what its requests carry
and how vLLM's metadata and the simulator's commands are read. They run only if they are named:
`pytest tests/schedulers/long_nixl_pull.py`; `.ci/full schedulers` runs all. Without the engines'
environment they fail.
"""
