"""The tests that make an object a backend. A wheel, also one written elsewhere, proves itself with one test file:

    from megamoe.testing.conformance import BackendConformance
    from my_wheel import SPEC

    class TestMyBackend(BackendConformance):
        spec = SPEC

Tests of the description and of planning run on any machine. Tests that compute are skipped, with the reason, where ``probe`` says no or
``SPEC.missing`` says that there is no kernel yet; what ``supports`` refuses is skipped with its reasons. Results are judged by the float64
oracle. ``pip install "megamoe-core[testing]"`` brings what it needs, pytest.
"""

from __future__ import annotations

try:
    import pytest
except ImportError as error:
    raise ImportError('The conformance kit needs pytest. Fix: pip install "megamoe-core[testing]"') from error

# Before they are imported: failing asserts then show their values, as in any test file.
pytest.register_assert_rewrite(*(f"{__name__}.{part}" for part in ("description", "ranks", "results", "subject")))

from megamoe.testing.conformance.description import DescriptionTests  # noqa: E402
from megamoe.testing.conformance.ranks import RankTests  # noqa: E402
from megamoe.testing.conformance.results import ResultTests  # noqa: E402

__all__ = ["BackendConformance"]


class BackendConformance(DescriptionTests, ResultTests, RankTests):
    """Subclass it as ``Test...`` and set ``spec``. For backends with special needs: ``device``, ``sizes``, ``ranks``, ``shared_gpu``."""
