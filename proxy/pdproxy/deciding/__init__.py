"""What decides which engines serve a request: the other side of `scheduling.scheduler`."""
