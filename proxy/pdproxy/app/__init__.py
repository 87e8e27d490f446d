"""The composition root: makes a running server from the settings."""
