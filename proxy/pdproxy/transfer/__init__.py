"""One small module a KV transfer contract: what to say to each engine, and in which order. Pure."""
