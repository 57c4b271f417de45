"""The conformance kit of core: description and planning everywhere, everything where there is a Hopper GPU."""

from __future__ import annotations

import pytest

from megamoe.testing.conformance import BackendConformance
from megamoe.testing.conformance.description import DescriptionTests
from megamoe_sm90 import SPEC


class TestDescription(DescriptionTests):
    spec = SPEC


@pytest.mark.sm90
class TestSm90(BackendConformance):
    spec = SPEC
    shared_gpu = True
