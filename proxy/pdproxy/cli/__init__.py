"""The `pdproxy` command: one file a command that parses, calls and prints."""
