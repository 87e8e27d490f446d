"""`pdproxy demo`: engines, the proxy, some traffic and a live view of all of it, in one command."""
