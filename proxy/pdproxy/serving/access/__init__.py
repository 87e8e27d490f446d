"""Who asks for what: clients, their keys, and the table of routes."""
