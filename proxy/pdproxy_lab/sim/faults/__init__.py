"""Faults of a simulated engine, without sockets: one class per fault has its name, arguments,
moments and actions.

A new fault is one class in one of the family files `connection`, `writing`, `answers`, `engine`,
`notices`, and its entry in that file's `FAMILY`. `book` keeps the faults that are armed. `targets`
describes what a fault acts on; the server implements it.
"""
