"""Tests that failed: where their messages are recorded, the list of tests that failed once, and how
a test that hangs ends.
"""
