"""Which engines serve a request. Pure: time is passed in, nothing here waits or talks."""
