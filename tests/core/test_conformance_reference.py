"""The reference backend proves itself with the kit that every backend uses."""

import pytest

from megamoe.reference import SPEC
from megamoe.testing.conformance import BackendConformance


class TestReference(BackendConformance):
    spec = SPEC


@pytest.mark.gpu
class TestReferenceOnGpu(BackendConformance):
    spec = SPEC
    device = "cuda"
