"""CuTe DSL building blocks that do not depend on the matrix instructions: routing, ready counters, task stream, combine, deadlines.

Global memory is addressed by 64-bit integers, so that one rule holds everywhere: an address is `base + byte offset`, computed in 64 bits.
"""
