"""Tests of `pdproxy up`: its arithmetic by tables, and the command with simulated engines."""
