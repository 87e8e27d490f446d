"""vLLM's OpenAI server as recorded, in front of a simulated engine."""
