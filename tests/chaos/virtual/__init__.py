"""An event loop in virtual time with a network in memory: it needs no sockets, and equal inputs
give equal runs.
"""
