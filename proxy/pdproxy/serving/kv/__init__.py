"""KV that engines hold for the proxy: custody, orphaned prefill legs, waits for notices, space in
receive buffers.
"""
