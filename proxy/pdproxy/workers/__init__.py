"""Several processes that serve as one, `listen.workers` of them: what keeps them, what they share,
and what they tell each other.
"""
