"""What all server processes that an operator starts have in common: the log, the exit code of a
failure, and of a taken port.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable

from pdproxy.kit import core_dumps, kept_memory
from pdproxy.kit.frames import frames
from pdproxy.observe.logs import Log, configure
from pdproxy.settings.errors import SettingsError
from pdproxy.settings.schema import Settings
from pdproxy.settings.tracing import check_installed

logger = logging.getLogger("pdproxy")


def run_logged(settings: Settings, serve: Callable[[Log], int]) -> int:
    """Return the exit code of `serve`, which gets the log that these settings ask for; 1 if it
    fails.

    Raises:
        SettingsError: the process can't serve with these settings.
    """
    check_installed(settings.observe.tracing)
    kept_memory.keep()
    if not settings.observe.core_dumps:
        core_dumps.forbid()
    observe = settings.observe
    traces = observe.tracing.endpoint is not None
    log = configure(observe.log_level, observe.log_format, traces=traces)
    try:
        return serve(log)
    except SettingsError:
        raise  # an operator's mistake, which the command line reports
    except Exception as error:
        logger.critical("pdproxy failed: %s", frames(error))
        return 1
    finally:
        log.close()


def cant_listen(settings: Settings, log: Log, error: OSError) -> int:
    """Say that clients' port or Unix socket can't be had. Return the exit code."""
    where = settings.listen
    place = (
        f"listen.uds = {where.uds}"
        if where.uds is not None
        else f"listen.host:listen.port = {where.host}:{where.port}"
    )
    log.close()
    with contextlib.suppress(OSError):  # nobody reads it
        sys.stderr.write(f"pdproxy serve: can't listen on {place}: {error.strerror or error}\n")
    return 2
