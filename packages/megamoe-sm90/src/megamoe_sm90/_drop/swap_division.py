"""Correctly rounded fp32 division by a shared divisor in few instructions a value.

The quantization rules ask for IEEE division; the compiler's own costs about ten instructions, a branch and a call each. With the correctly
rounded reciprocal of the divisor, one remainder step gives the correctly rounded quotient (Markstein), as long as nothing under- or
overflows on the way: quotients of quantization lie within the format's range, and tiny ones round to zero either way.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32


def reciprocal(divisor):
    """1 / divisor, correctly rounded: the hardware's approximation (1 ulp) and one Newton step."""
    rough = cute.arch.rcp_approx(divisor)
    return cute.math.fma(rough, cute.math.fma(-divisor, rough, 1.0), rough)


def divide(value, divisor, inverse):
    """value / divisor, given ``inverse = reciprocal(divisor)``. Quotients too large for the remainder step (infinity, above all) saturate
    when they are converted, whatever their last bit."""
    rough = value * inverse
    exact = cute.math.fma(cute.math.fma(-divisor, rough, value), inverse, rough)
    return Float32(cutlass.select_(cute.arch.fmax(rough, -rough) < 1e30, exact, rough))
