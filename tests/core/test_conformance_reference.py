"""The reference backend proves itself with the kit that every backend uses."""

from megamoe.reference import SPEC
from megamoe.testing.conformance import BackendConformance


class TestReference(BackendConformance):
    spec = SPEC
