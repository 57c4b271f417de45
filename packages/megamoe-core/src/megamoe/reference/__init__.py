"""The reference backend: plain torch, every format, on CPU and GPU, over torch.distributed. Importing this package does not load torch.

``arithmetic`` is the layer itself, ``routing`` decides where each row goes, ``exchange`` takes it there, ``session`` joins them.
"""

from __future__ import annotations

from megamoe.formats import FORMATS
from megamoe.protocol import PROTOCOL, BackendSpec

SPEC = BackendSpec(
    name="reference",
    protocol=PROTOCOL,
    archs=(),
    formats=tuple(FORMATS),
    features=("expert parallel", "redundant experts", "biases", "prequantized weights", "early and late routing weight"),
    summary="plain torch on any device; exact rounding, not fast",
    factory="megamoe.reference.backend:ReferenceBackend",
    status="native",
)
