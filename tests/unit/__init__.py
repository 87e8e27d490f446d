"""One module at a time, without sockets."""
