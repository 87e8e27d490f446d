"""What crosses the network, and the stages of a request. Pure: no sockets, no clock."""
