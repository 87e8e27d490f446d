"""`pdproxy simulate`: the scheduling code of the proxy over virtual engines, in virtual time.

Nothing here works per token, so that a hundred thousand requests on many engines take a minute.
docs/guide/measure.md says what is left out.
"""
