"""Logging: one logger for the project, silent below warnings unless ``MEGAMOE_LOG`` asks for more."""

from __future__ import annotations

import functools
import logging

from megamoe import env


@functools.cache
def logger() -> logging.Logger:
    """The ``megamoe`` logger.

    Python's own rule prints warnings on stderr when an application has set up no logging, so nothing is installed by default. A level in
    ``MEGAMOE_LOG`` asks for output: then the logger gets a handler on stderr.

    Raises:
        InvalidInput: ``MEGAMOE_LOG`` is not a level.
    """
    log = logging.getLogger("megamoe")
    if env.LOG.read() is not None:
        log.setLevel(env.log_level())
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s megamoe: %(message)s"))
        log.addHandler(handler)
        log.propagate = False
    return log
