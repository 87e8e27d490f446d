"""Why a prompt has no ids here. None of these is a fault of the request's."""

from __future__ import annotations


class UnsureError(Exception):
    """It can't be told what an engine would make of this prompt. The words name fields, never what they hold."""


class RejectedError(Exception):
    """The model's chat template takes no such conversation. An engine would refuse the request in its own words."""


class UnusableError(Exception):
    """A folder holds no tokenizer that could be used. One line."""
