"""What the tests of faults share: an answer of four words, and how far it has come at each
moment.
"""

from pdproxy.engine_model.hardware import Hardware
from pdproxy_lab.sim.facts import SimFacts

WORDS = 4
FAST = SimFacts(hardware=Hardware(speed=0), eos_every=0)
STREAM_MOMENTS = {
    "prefilling": 0,
    "head": 0,
    "before_first_token": 0,
    "mid_stream": 2,
    "last_chunk": WORDS - 1,
    "before_done": WORDS,
}
"""Moments of a stream, and how many events are out by then."""
