"""A machine on the CPU for PTX of sm_90a: it becomes C++, a fiber runs every GPU thread, several GPUs run at once in one process.

    problem = MoEProblem(experts=8, top_k=2, hidden=512, intermediate=256, max_tokens=64, format="fp8_block128")
    layer = OneRank(problem, "native", 128, "pool", grid=4)
    out = layer.run(layer.trial.inputs[0], seed=3)
    assert not layer.judge(layer.trial.inputs[0], out)      # the oracle has nothing against it

    layer = Ranks(problem, 2, grid=3)                       # every rank's launch at once, each with its own memory
    outs = layer.run(layer.trial.inputs, seed=3)
    layer.run(layer.trial.inputs, change=lambda rank, launch: None if rank == 1 else launch)    # rank 1 never comes
    layer.status(0)                                         # the wait that passed its deadline, in virtual time

``layers`` launches the sm90 kernels through the shim's own argument lists, ``launch`` runs any kernel of CuTe DSL or of PTX text,
``translate``, ``instructions``, ``arithmetic`` and ``operands`` make C++ of PTX, and ``host/`` is what that C++ calls.

A kernel may call C functions that it is given (``operands.Functions``): ``tests/emulation`` runs rewritten Blackwell kernels here that way,
with the emulation's device functions (``tests/emulation/host``). A launch with fewer SMs than CTAs runs in waves.

A seed decides the order of threads (some seeds let warps starve for long) and when copies, bulk stores and products take effect between
their issue and the wait that must see them; what they write is poisoned until then, as are shared memory and registers that were never
written. So a wait that is missing shows as wrong bytes, as a wrong count of a barrier, or as a hang, on some seed if not on the first.
Accesses must lie in the CTA's shared memory or in the buffers that the launch was given, aligned. When no thread can go on, or all poll in
vain, the fault says at which lines of the PTX which threads wait. Faults are :class:`tests.machine.launch.MachineFault`.

What bulk and tensor loads read of words that were written in the same run, without a ``fence.proxy.async`` of the writing or the reading
warp since, arrives as poison (a box may reach over words that nobody uses; ``Ran.text`` names the first). Bulk stores and products that
read such words of shared memory are a fault.

Loads and stores happen one after the other, so a missing fence, acquire or release changes no bytes. With ``races=True`` layers check what
happens before what, in all their launches: accesses that conflict and are not ordered, or not as far as their scopes reach, are a fault,
whatever order they came in, and so are copies over shared memory that threads have accessed with no proxy fence on the way
(``host/order.cpp`` has the rules). Runs then take two to three times as long.

Sums of products are float32 in order of K, where tensor cores keep fewer bits of FP8 sums.
"""
