"""Tests of pdproxy in front of real vLLM engines with NIXL on this machine's CPU."""
