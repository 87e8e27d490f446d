"""The section `tenants`: what tenants may learn of each other.

Owns names, units, bounds and defaults.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from pdproxy.settings.errors import Mistakes, SettingsError
from pdproxy.settings.files import read_key
from pdproxy.settings.section import AtOnce, File, Section
from pdproxy.settings.yaml_file import spell_file

Caches = Literal["auto", "separate", "shared"]
AUTO, SEPARATE, SHARED = "auto", "separate", "shared"
MIN_SECRET = 32
"""Characters: as many as 16 random bytes have in hexadecimal digits."""
Secret = Annotated[
    str,
    Meta(
        pattern=rf"\A[\x21-\x7e]{{{MIN_SECRET},}}\Z", description="32 or more visible ASCII characters without blanks"
    ),
]


class TenantSettings(Section, frozen=True):
    """Whether tenants share engines' caches. A tenant is a name of keys, or a key without a name; without keys, an address."""

    caches: AtOnce[Caches] = "auto"
    """separate: engines find in their prefix caches only what the same tenant has sent. shared: also what others have sent, and
    who measures times or reads cached_tokens can guess their prompts. auto: separate where keys of several tenants are valid, or
    overload.tenant_header is set."""

    secret: Secret | None = None
    """The key of the hash that makes tenants' salts, 32 or more characters (openssl rand -hex 32). Replicas need the same one to
    use each other's caches. null, without secret_file: a random one, new at each start, so that all caches begin anew."""

    secret_file: File | None = None
    """A file that holds it. Read again when it changes: then all caches begin anew."""

    def __repr__(self) -> str:
        # Settings appear in logs and tracebacks; secrets must not.
        return f"TenantSettings({self.caches}, <secret {'set' if self.secret or self.secret_file else 'not set'}>)"


def read_secret(setting: str, path: str) -> str:
    """Return the secret that a file holds.

    Raises:
        SettingsError: it can't be read, or holds something else.
    """
    secret = read_key(setting, path)
    if len(secret) < MIN_SECRET:
        raise SettingsError(f"{setting}: {spell_file(Path(path))}: holds less than {MIN_SECRET} characters")
    return secret


def check_tenants(tenants: TenantSettings, found: Mistakes) -> None:
    """Refuse two secrets."""
    if tenants.secret is not None and tenants.secret_file is not None:
        names = "secret", "secret_file"
        where = "".join(dict.fromkeys(found.source(("tenants", name)) for name in names))
        found.add(("tenants",), f"tenants: secret and secret_file exclude each other: give one{where}")
