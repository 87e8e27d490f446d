"""What other installed packages bring to pdproxy, by their entry points.

Only what is installed beside pdproxy can be a plugin: nobody from outside of the machine adds one.
A plugin runs in the process of the proxy, and may do there whatever the proxy may do.
"""

from __future__ import annotations

from collections.abc import Collection
from importlib.metadata import entry_points


class PluginError(ValueError):
    """A plugin can't be used. The text names it."""


def plugins(group: str, own: Collection[str]) -> dict[str, object]:
    """Return the objects of a group by their names, in the order of the names. `own`: names that
    pdproxy has itself.

    Raises:
        PluginError: one can't be imported, or has a name that is taken.
    """
    found: dict[str, object] = {}
    for point in sorted(entry_points(group=group), key=lambda one: (one.name, one.value)):
        named = f"the plugin {point.name!r} of {group} ({point.value})"
        if point.name in own or point.name in found:
            raise PluginError(f"{named}: there is another one of this name")
        try:
            found[point.name] = point.load()
        except Exception as error:
            raise PluginError(
                f"{named} can't be imported: {type(error).__name__}: {error}"
            ) from error
    return found
