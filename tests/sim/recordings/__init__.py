"""Raw exchanges with vLLM 0.32.0 engines (a tiny random model, blocks of 32 tokens, 2048 at most)
and what replays them.
"""

import pytest

# They compare, so a difference has to be told in full.
pytest.register_assert_rewrite(
    *(f"{__name__}.{module}" for module in ("pages", "scenes", "sequences", "stage", "streams"))
)
