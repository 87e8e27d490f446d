"""Stand-ins for engines and clients that the fast tests talk to over real sockets."""
