"""What shows from outside which contract an engine runs. Each contract's `ENTRY` declares its own
signs; `detect` compares them.

Few contracts show themselves. vLLM's API does not report the connector (only `/server_info`, in its
development mode), and some engines crash at a request that is not of their contract. So an engine
is asked for KV only if its metrics show that it is safe.
"""

from __future__ import annotations

import re

import msgspec

_RELEASE = re.compile(r"(\d+)\.(\d+)")


def release(version: str) -> tuple[int, int] | None:
    """Return the first two numbers of a version of vLLM, None if it can't be read."""
    found = _RELEASE.match(version)
    return None if found is None else (int(found[1]), int(found[2]))


class SignQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """A question that all engines with a contract's metrics survive, and how an engine of this
    contract answers it.

    `params`: the `kv_transfer_params` of a completion of one token, as JSON. `keys`: fields that
    the answer's params have. `values`: for each name the value that the answer has there, if it has
    the field: older engines may not.
    """

    params: bytes
    keys: tuple[str, ...]
    values: tuple[tuple[str, str], ...] = ()

    def shown_by(self, params: bytes) -> bool:
        """Return whether an answer's params show the contract. Anything may be in them: an engine
        wrote them.
        """
        try:
            found = msgspec.json.decode(params)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return False
        if not isinstance(found, dict):
            return False
        named = all(found.get(key) is not None for key in self.keys)
        return named and all(found.get(name) in (None, value) for name, value in self.values)


class ContractSigns(msgspec.Struct, frozen=True, kw_only=True):
    """The signs of a contract."""

    metrics: tuple[str, ...] = ()
    """Beginnings of names of metrics that its engines may have, and engines of few other
    contracts.
    """

    always: bool = False
    """All of its engines have such metrics."""

    ask: SignQuestion | None = None
    """A question for prefill engines that have these metrics."""

    bootstrap: bool = False
    """Its prefill engines have a Mooncake bootstrap server, at the address of the settings."""

    first_version: str = ""
    """The first release of vLLM that may have such a connector, `0.20`. Empty: the oldest that is
    known.
    """

    last_version: str = ""
    """The last release of vLLM with such a connector, `0.23`. Empty: the newest that is known."""

    def in_version(self, version: str) -> bool:
        """Return whether an engine of this version may run the contract. A version that can't be
        read excludes nothing.
        """
        found = release(version)
        first, last = release(self.first_version), release(self.last_version)
        return found is None or (
            (first is None or first <= found) and (last is None or found <= last)
        )


NO_SIGNS = ContractSigns()
