"""Raw exchanges with vLLM 0.32.0 engines (a tiny random model, blocks of 32 tokens, 2048 at most) and what reads them."""
