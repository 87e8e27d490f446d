"""The proxy in front of fake engines, over real sockets."""
