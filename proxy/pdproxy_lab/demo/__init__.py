"""`pdproxy demo`: engines, the proxy, some traffic and a live view in one command."""
