"""Real vLLM engines with NIXL on this machine's CPU, and the tests that put pdproxy in front of them."""
