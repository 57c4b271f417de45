"""What reaches stderr: warnings by default, more when MEGAMOE_LOG asks, and nothing twice in an application that logs itself."""

import os
import subprocess
import sys

import pytest

SAY = """
from megamoe.log import logger
log = logger()
assert logger() is log
for level in ("debug", "info", "warning", "error"):
    getattr(log, level)("a %s", level)
"""


def said(code=SAY, **variables):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MEGAMOE_")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**environment, **variables}, timeout=60)
    assert done.stdout == ""
    return done.stderr


def test_warnings_by_default():
    assert said() == "a warning\na error\n"


@pytest.mark.parametrize(("level", "first"), [("debug", 0), ("INFO", 1), ("warning", 2), ("error", 3)])
def test_the_level_asked_for(level, first):
    lines = [f"{name.upper()} megamoe: a {name}" for name in ("debug", "info", "warning", "error")]
    assert said(MEGAMOE_LOG=level).splitlines() == lines[first:]


def test_an_applications_own_logging_is_left_alone():
    assert said("import logging\nlogging.basicConfig(format='mine %(message)s')\n" + SAY) == "mine a warning\nmine a error\n"


def test_a_level_that_is_none_is_invalid():
    assert "InvalidInput: MEGAMOE_LOG='loud' is not a log level; allowed: debug, info, warning, error" in said(MEGAMOE_LOG="loud")
