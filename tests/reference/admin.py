"""The OpenAPI document of the admin API, as `/openapi.json` of that API shows it."""

from __future__ import annotations

import json
from typing import cast

from pdproxy.web.admin.api import AdminApi
from pdproxy.web.admin.app import create_admin_app
from pdproxy.web.admin.live import Feed
from tests.release import version


def page() -> str:
    """Return the document. The routes do not ask their service for it."""
    document = create_admin_app(cast("AdminApi", None), cast("Feed", None)).openapi()
    # of this tree: what is installed may be of an older one
    document["info"]["version"] = version.current()
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"
