"""The `pdproxy` command: one file per command, which parses, calls and prints."""
