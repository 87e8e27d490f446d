"""Frozen events for everything that happened, and their observers: metrics and the log. Observers
change nothing.
"""
