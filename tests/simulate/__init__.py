"""Tests of `pdproxy simulate`."""
