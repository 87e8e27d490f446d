"""The part that runs inside vLLM: `pdproxy_nixl.py`, one file to copy into an engine's environment.

It imports vLLM and nothing of this package, and nothing of this package imports it: `pdproxy
notifier` prints it as text.
"""
