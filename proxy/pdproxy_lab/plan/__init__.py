"""`pdproxy plan`: which arrangement of engines serves a load best within an SLO. It searches with
`lab.simulate`.

docs/guide/measure.md says what is searched, docs/internals/engine-model.md how.
"""
