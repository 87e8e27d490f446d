"""The tools' commands of `pdproxy`: one file per command, which parses, calls and prints."""
