"""Runs small rewritten kernels on the CPU with data races as faults, those of the emulation's own device functions, too.

    python run_races.py [KERNEL FILE OLD NEW]

With arguments it runs one kernel with a planted fault: in a file of the device functions one text takes the place of another. Prints what
was found, by kernel, as one JSON document; "" where all was in order.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.emulation import on_machine, test_delayed, test_mma, test_tensor
from tests.emulation.conftest import OnHost
from tests.machine.launch import MachineFault

KERNELS = {
    "one CTA": lambda host: test_delayed.multiply(host, None),
    "pair": lambda host: test_delayed.multiply(host, None, 2),
    "one thread": lambda host: test_delayed.multiply(host, None, elected=False),
    "one CTA, delayed": lambda host: all(test_delayed.multiply(host, seed) for seed in (1, 2, 3)),
    "pair, delayed": lambda host: all(test_delayed.multiply(host, seed, 2) for seed in (1, 2)),
    "four warps, delayed": lambda host: all(test_delayed.by_four_warps(host, seed) for seed in range(1, 5)),
    "scales": lambda host: test_mma.test_block_scales(host, *test_mma.SCALED[-1]) is None,
    "box": lambda host: test_tensor.test_boxes(host, test_tensor.PADDED, (-32, 5), True) is None,
    "rows": lambda host: test_tensor.test_gathered_rows(host, test_tensor.PACKED, (256, 60)) is None,
    "store": lambda host: test_tensor.test_stores(host, test_tensor.PACKED) is None,
}


def found(run):
    try:
        return "" if run(OnHost()) else "a wrong result"
    except (MachineFault, AssertionError) as fault:
        return str(fault)


on_machine.RACES = True
if sys.argv[1:]:
    on_machine.CHANGES.append(tuple(sys.argv[2:]))
print(json.dumps({name: found(KERNELS[name]) for name in sys.argv[1:2] or KERNELS}))
