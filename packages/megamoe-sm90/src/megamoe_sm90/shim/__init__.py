"""All adaptation between megamoe and the kernels in ``_drop``: nothing else imports them.

knobs.py      the knob space, and which kernel runs for how many tokens
variants.py   one compiled kernel: construction, compile request, memory, launch arguments
weights.py    experts in kernel layout
workspace.py  a session's device memory, and what the kernels report to the host
"""
