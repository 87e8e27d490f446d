"""Which engines hold KV of a prompt's beginning. Pure.

`keys` makes the keys of a prompt's blocks. Three indexes take them and answer with
`matches.Matches`: `block_index` has what engines report (KV events), `speculative` what was routed
in the last seconds, `routed` what was routed to engines that report nothing. `prediction` turns a
match into the cached tokens that the engine will report, and compares the two.

A place is one prefix cache: a data-parallel rank of an engine. Places are numbers; who has which is
the caller's concern.
"""
