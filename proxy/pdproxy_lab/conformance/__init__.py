"""`pdproxy conformance`: proves step by step that engines behind this proxy do what the connector's
contract says.

`stand` runs the proxy in front of one pair of engines, `tap` records its requests and events,
`pair_under_test` sends requests and reads the engines' own counters, `checks` judge, `report`
prints. A new check is a function in one file of `checks`, and its entry in that file's `CHECKS`.
"""
