"""What crosses the network: requests, answers, streams, notices. Pure: no sockets, no clock."""
