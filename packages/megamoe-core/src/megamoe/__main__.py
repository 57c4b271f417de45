"""``python -m megamoe`` is the ``megamoe`` command."""

import sys

from megamoe.cli import main

sys.exit(main())
