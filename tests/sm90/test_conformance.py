"""The conformance kit of core: description and planning everywhere, results where there is a Hopper GPU."""

from __future__ import annotations

from megamoe.testing.conformance import BackendConformance
from megamoe_sm90 import SPEC


class TestSm90(BackendConformance):
    spec = SPEC
    shared_gpu = True
