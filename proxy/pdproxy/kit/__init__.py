"""Tools that every package may use: errors, ids, owned tasks, shared numbers, the clock. Standard
library only.
"""
