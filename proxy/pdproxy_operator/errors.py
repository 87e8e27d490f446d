"""Mistakes in resources that no schema can find."""

from __future__ import annotations


class ConfigError(Exception):
    """A resource asks for what can't be. The message is a sentence for its owner."""
