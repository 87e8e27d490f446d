"""What a request may do: clients, their keys, and the table of routes."""
