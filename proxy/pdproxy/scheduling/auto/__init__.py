"""The placement `auto`: decides for each request by predicted latencies where it runs and whether
it is split. Pure.

`times`: how long work takes at an engine. `loads`: what an engine has to do, in a few numbers.
`correction`: what legs that ended say of these predictions. `costs`, `weights`: what it costs
against the SLO. `roles`: which engines are kept for prefill.
"""
