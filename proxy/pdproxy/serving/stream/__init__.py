"""One answer on its way from a decode engine to the client."""
