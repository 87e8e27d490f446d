"""`pdproxy conformance`: do these engines, through this proxy, do what the connector's contract says? Proven step by step.

`stand` runs the proxy itself in front of one pair of engines, `tap` notes what it sends them and what happens in it, `bench`
asks questions and reads the engines' own counters, `checks` judge, `report` prints. A new check is a function in one file of
`checks`, and its entry in that file's `CHECKS`.
"""
