"""The OpenAPI document of the admin API, as `/openapi.json` of that API shows it."""

from __future__ import annotations

import json
from typing import cast

from pdproxy.web.admin.api import AdminApi
from pdproxy.web.admin.app import create_admin_app
from pdproxy.web.admin.live import Feed


def page() -> str:
    """Return the document. The routes do not ask their service for it."""
    return (
        json.dumps(
            create_admin_app(cast("AdminApi", None), cast("Feed", None)).openapi(),
            indent=2,
            ensure_ascii=False,
        )
        + "\n"
    )
