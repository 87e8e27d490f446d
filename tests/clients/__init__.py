"""The bodies that clients send: how they are recorded, and what the proxy answers to them."""
