"""What runs inside vLLM: `pdproxy_nixl.py`, one file to be copied into an engine's environment.

It imports vLLM and nothing of this package, and nothing of this package imports it: `pdproxy notifier` hands it out as a text.
"""
