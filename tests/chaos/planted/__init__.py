"""Bugs that are planted into a copy of the package, one at a time, to see whether chaos finds
them.
"""
