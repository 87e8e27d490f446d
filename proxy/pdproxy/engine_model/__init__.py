"""How long an engine's work takes: the formula, and profiles with its numbers. For the simulator
and for scheduling. Pure.
"""
