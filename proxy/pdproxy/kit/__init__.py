"""Tools that every package may use: errors, ids, owned tasks, worker processes, the clock. Standard
library only.
"""
