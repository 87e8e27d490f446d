"""The proxy and simulated engines under seeded load and faults, in virtual time, checked against
invariants.
"""
