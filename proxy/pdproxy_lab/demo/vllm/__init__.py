"""Real vLLM engines for the demo: found, started in process groups of their own, watched, and ended
without remains.
"""
