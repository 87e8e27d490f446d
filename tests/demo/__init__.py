"""Tests of `pdproxy demo`: its arithmetic, its looks, its traffic, and the command as a process."""
