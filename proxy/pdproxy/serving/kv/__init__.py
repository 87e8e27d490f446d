"""KV that is kept for us: custody, orphaned prefills, waits for notices, space in receive buffers."""
