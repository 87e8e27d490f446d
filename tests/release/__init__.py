"""Releases: what is built, what it may change, and the description of the last one."""
