"""One request from its first byte to its last: read, admitted, answered, reported."""
