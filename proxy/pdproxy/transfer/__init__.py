"""KV transfer contracts, one module each: what each engine is sent, and who holds KV afterwards.
Pure.
"""
