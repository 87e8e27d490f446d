"""Tests of `pdproxy conformance`."""
