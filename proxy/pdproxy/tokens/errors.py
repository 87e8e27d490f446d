"""Why a prompt gets no ids here. None of these is a fault of the request."""

from __future__ import annotations


class UnsureError(Exception):
    """The ids that an engine would make of this prompt are not known. The message names fields,
    never their values.
    """


class RejectedError(Exception):
    """The model's chat template refuses this conversation. An engine would refuse the request with
    its own message.
    """


class UnusableError(Exception):
    """A folder has no tokenizer that can be used. The message is one line."""


class NotInstalledError(UnusableError):
    """The library of tokenizers is not installed. The message says where it is."""
