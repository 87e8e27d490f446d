"""Engines as they really are: probed, compared, and audited for KV that never moved."""
