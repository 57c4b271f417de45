"""What the ranks of test_ranks.py do, in processes of their own: sessions, and every kind of launch, fault and death."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import traceback
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.ranks.groups import new_group

from megamoe import MoEProblem
from megamoe.compile.obtain import obtain
from megamoe.compile.store import Store
from megamoe.ep.group import Group
from megamoe.errors import InvalidInput, MegaMoEError
from megamoe.testing import cases, oracle, routing
from megamoe.testing.trial import Inputs, make_trial
from megamoe_sm90 import ranks_plan
from megamoe_sm90.backend import Sm90Backend
from megamoe_sm90.ranks_session import Sm90RanksSession
from megamoe_sm90.shim.variants import SMS, Operands

BACKEND = Sm90Backend()
FORMATS = ("fp8_block128", "bf16", "fp8_tensor", "fp8_tensor_e5m2")
PINNED = {"order": "native", "native_tile": 128, "native_rows": "pool"}
MODES = ["grouped", "routes"]
"""How routes of a token come together: ``routes`` has the bits of one rank."""
FEWER_BITS = ["mxfp8"]
"""Grouped results that return in fewer bits than the layer's own rounding has."""
NO_ROOM = ["alone"]
"""Grouped results whose rows find no room to wait in, so that each returns by itself."""
OVERLAPPING = ["pdl"]
"""Launches that may begin while the one before them ends."""
PLAIN = [*MODES, *FEWER_BITS, *NO_ROOM]
_KNOBS = {
    "grouped": {"combine": "grouped"},
    "routes": {"combine": "routes"},
    "mxfp8": {"combine": "grouped", "wire": "mxfp8"},
    "alone": {"combine": "grouped", "stage": 0},
    "pdl": {"combine": "grouped", "pdl": True},
}


def problem_of(format="fp8_block128", **more):
    return MoEProblem(**{"experts": 16, "top_k": 4, "hidden": 512, "intermediate": 256, "max_tokens": 48, "format": format, **more})


def wire_of(mode):
    return mode if mode in FEWER_BITS else "bf16"


def plan_of(problem, ranks, mode):
    return BACKEND.plan(problem, ranks=ranks, knobs={"native_tile": 128, **_KNOBS[mode]})


def kernels(problem, ranks, mode, delays):
    """What a session compiles for ranks that share one GPU, so that it can be there before they start."""
    if ranks == 1:
        yield from BACKEND.kernels(BACKEND.plan(problem, knobs=PINNED))
        return
    plan = plan_of(problem, ranks, mode)
    for quantized in (False,) if problem.format == "bf16" else (False, True):
        variant = ranks_plan.variant(problem, ranks, plan.detail, Operands(quantized=quantized, sms=SMS // ranks))
        yield replace(variant, config=replace(variant.config, delays=delays)).request()


def compile_one(arguments):
    """The kernels of one session; arguments of :func:`kernels`."""
    for request in kernels(*arguments):
        obtain(request)


def compile_all():
    """Most kernels, side by side, before any rank waits for another one's compiler. Needs no GPU."""
    wanted = [(problem_of(format), ranks, mode, False) for mode in (*PLAIN, *OVERLAPPING) for ranks in (1, 2, 4) for format in FORMATS]
    wanted += [(problem_of(), ranks, mode, delays) for mode in MODES for ranks, delays in ((8, False), (2, True), (4, True))]
    missing = [one for one in wanted if not all(Store().load(request.digest()) for request in kernels(*one))]
    if missing:
        with ProcessPoolExecutor(min(len(missing), os.cpu_count() or 1), get_context("spawn")) as pool:
            list(pool.map(compile_one, missing))


class Opened:
    """A rank's session, and the same layer on one rank for results that have to be the same to the bit."""

    def __init__(self, rank, problem, mode, group=None, *, delays=False, seed=0):
        self.device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(self.device)
        self.handle = group or dist.group.WORLD
        ours = Group.of(self.handle)
        self.rank, self.ranks, self.problem, self.mode = ours.rank, ours.size, problem, mode
        self.trial = make_trial(problem, ranks=self.ranks, seed=seed)
        self.experts = oracle.Experts(problem.format, self.trial.weights)
        plan = plan_of(problem, self.ranks, mode)
        packed = BACKEND.prepare_weights(plan, self.trial.local_weights(self.rank, self.device))
        self.single = self.in_turn(self._single)
        if delays:
            self.session = Sm90RanksSession(plan, packed, ours, delays=True)
        else:
            self.session = BACKEND.open_session(plan, packed, self.handle)
        self.generator, self.calls = torch.Generator().manual_seed(100 * seed + rank), 0

    def _single(self):
        plan = BACKEND.plan(replace(self.problem, placement=None), knobs=PINNED)
        weights = self.trial.weights
        whole = replace(weights, **{name: tensor.to(self.device) for name, tensor in weights.tensors().items()})
        return BACKEND.open_session(plan, BACKEND.prepare_weights(plan, whole))

    def in_turn(self, call):
        """One rank after the other: kernels of one rank take every multiprocessor, so no two of them fit on a shared GPU."""
        for turn in range(self.ranks):
            if turn == self.rank:
                found = call()
                torch.cuda.synchronize()
            self.meet()
        return found

    def meet(self):
        dist.barrier(group=self.handle)

    def inputs(self, tokens, pattern="zipf"):
        ids = routing.PATTERNS[pattern](self.problem, tokens, self.generator).to(torch.int32)
        x = torch.randn(tokens, self.problem.hidden, generator=self.generator).to(torch.bfloat16)
        return Inputs(x, ids, routing.weights(tokens, self.problem.top_k, self.generator)).to(self.device)

    def call(self, inputs, out=None):
        """Launch into an output of NaN."""
        out = torch.empty_like(inputs.x) if out is None else out
        out.fill_(float("nan"))
        self.calls += 1
        return self.session.run(*inputs, out=out)

    def other_bits(self, inputs, out):
        """What is wrong beside one rank's result; all ranks ask. Sums per rank are rounded on the wire, so theirs are other bits."""
        if self.mode != "routes":
            return ""
        return "" if same(self.in_turn(lambda: self.single.run(*inputs)), out) else "other bits than on one rank"

    def judged(self, inputs, out):
        """What the oracle and one rank's bits say against a result; all ranks ask."""
        want = oracle.compute(self.problem, self.experts, *inputs)
        verdict = oracle.judge(out, want, format=self.problem.format, wire=wire_of(self.mode))
        return "; ".join(filter(None, ("" if verdict.ok else verdict.text, self.other_bits(inputs, out))))

    def extra_exchanges(self):
        """Exchanges beyond one for each launch since the session was opened."""
        return self.session._fabric.exchanges - self.calls

    def close(self):
        self.session.close()
        self.session.close()
        self.single.close()


def same(one, other):
    return bool(torch.equal(one.view(torch.int16), other.view(torch.int16)))


def many(rank, parts):
    """Functions of this file one after the other, until one raises: {part: its result, or the traceback}; ``parts``: name -> (function,
    its arguments)."""
    done = {}
    for part, (function, *arguments) in parts.items():
        start = time.monotonic()
        try:
            done[part] = globals()[function](rank, *arguments)
        except Exception:  # noqa: BLE001  the tests of the parts before it still count
            done[part] = traceback.format_exc()
            break
        finally:
            if rank == 0:
                sys.stderr.write(f"{dist.get_world_size()} ranks, {part}: {time.monotonic() - start:.1f} s\n")
                sys.stderr.flush()
    return done


# ---------------------------------------------------------------------------------------------------- right results


def one_launch(rank, mode):
    """The least that can work."""
    opened = Opened(rank, problem_of(), mode)
    inputs = opened.inputs(16)
    wrong = opened.judged(inputs, opened.call(inputs))
    found = wrong, opened.extra_exchanges()
    opened.close()
    return found


def routings(rank, formats, mode, only):
    """All cases of the list that every backend goes through, twice in the first format: {case: what is wrong}, launches too many."""
    wrong, extra = {}, []
    for format in formats:
        opened, first = Opened(rank, problem_of(format), mode), {}

        def also(case, inputs, out, opened=opened, first=first):
            opened.calls += 1
            repeats = same(out, first.setdefault(case, out))
            return opened.other_bits(inputs, out) if repeats else "the second turn gave other bits"

        for turn in range(1 + (format == formats[0])):
            where = opened.session, opened.trial, opened.rank, opened.device
            found = cases.go_through(*where, only=only, wire=wire_of(mode), also=also)
            wrong |= {f"{format}, turn {turn}, {case}": what for case, what in found.items()}
        extra.append(opened.extra_exchanges())
        opened.close()
    return wrong, extra


def placements(rank, mode):
    """Redundant, uneven and missing experts, fewer on a rank than a token has routes."""
    wrong = {}
    for number, (name, placement) in enumerate(cases.placements(8, dist.get_world_size()).items()):
        format, weight = ("fp8_block128", "late") if number % 2 else ("bf16", "early")
        problem = cases.placed(problem_of(format, top_k=6, routing_weight=weight), placement)
        opened = Opened(rank, problem, mode)
        found = cases.go_through(
            *(opened.session, opened.trial, opened.rank, opened.device),
            only=["masked"],
            also=lambda case, inputs, out, opened=opened: opened.other_bits(inputs, out),
        )
        wrong |= {f"{name}, {case}": what for case, what in found.items()}
        opened.close()
    return wrong


def smaller_group(rank, mode):
    """World ranks 3, 0, 2 in that order, with experts that tell them apart; then all four."""
    wrong = {}
    part, _ = new_group([3, 0, 2])
    for group in (part, dist.group.WORLD):
        if dist.get_rank(group) >= 0:
            problem = problem_of(experts=15)
            problem = cases.placed(problem, cases.placements(16, dist.get_world_size(group))["experts that do not divide"])
            opened = Opened(rank, problem, mode, group)
            found = cases.go_through(opened.session, opened.trial, opened.rank, opened.device, only=["masked"])
            wrong |= {f"{opened.ranks} ranks, {case}": what for case, what in found.items()}
            opened.close()
        dist.barrier()
    return wrong


def hot_path(rank, mode):
    """One launch a call and nothing else, no synchronization, no allocation, and replays of a captured call."""
    from cuda.bindings import runtime as cuda

    opened = Opened(rank, problem_of(), mode)
    inputs = opened.inputs((17, 0, 48, 1)[opened.rank % 4])
    out = torch.empty_like(inputs.x)
    opened.session.run(*inputs, out=out)
    torch.cuda.synchronize()
    opened.meet()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            opened.session.run(*inputs, out=out)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    allocated = torch.cuda.memory_stats()["allocation.all.allocated"] - before

    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        opened.session.run(*inputs, out=out)
    *_, count = cuda.cudaGraphGetNodes(graph.raw_cuda_graph(), 0)
    _, nodes, _ = cuda.cudaGraphGetNodes(graph.raw_cuda_graph(), count)
    kinds = [cuda.cudaGraphNodeGetType(node)[1] == cuda.cudaGraphNodeType.cudaGraphNodeTypeKernel for node in nodes]
    graph.instantiate()
    opened.calls = 4
    wrong = []
    for pattern in ("zipf", "masked", "one expert", "unrouted"):
        fresh = opened.inputs(inputs.x.shape[0], pattern)
        for target, source in zip(inputs, fresh, strict=True):
            target.copy_(source)
        out.fill_(float("nan"))
        opened.meet()
        graph.replay()
        opened.calls += 1
        torch.cuda.synchronize()
        wrong.append(opened.judged(fresh, out))
    extra = opened.extra_exchanges()
    opened.close()
    return allocated, kinds, wrong, extra


# ---------------------------------------------------------------------------------------------------- many launches

CHUNK = 500


def stress(rank, mode, launches, seconds):
    """Random token counts, delays at every step of the kernel and now and then on the host, against outputs that were judged before."""
    opened = Opened(rank, problem_of(), mode, delays=True, seed=1)
    rng, pool, wrong = random.Random(rank), [], []
    for _ in range(24):
        tokens = rng.choice((0, 0, 1, 2, 7, 16, 17, 48, rng.randrange(49)))
        inputs = opened.inputs(tokens, rng.choice(list(routing.PATTERNS)))
        want = opened.call(inputs)
        wrong.append(opened.judged(inputs, want))
        pool.append((inputs, want, torch.empty_like(want)))
    opened.meet()
    bad, start, done = torch.zeros((), dtype=torch.int64, device=opened.device), time.monotonic(), 0
    while done < launches:
        for _ in range(min(CHUNK, launches - done)):
            inputs, want, out = rng.choice(pool)
            bad += (opened.call(inputs, out).view(torch.int16) != want.view(torch.int16)).sum()
            done += 1
            if rng.random() < 0.002:
                time.sleep(rng.random() * 0.005)
        took = time.monotonic() - start
        over = torch.tensor([int(took > seconds), int(bad)])
        dist.all_reduce(over, op=dist.ReduceOp.MAX)
        if rank == 0:
            sys.stderr.write(f"stress: {done} of {launches} launches in {took:.1f} s, {'wrong bytes' if over[1] else 'no wrong byte'}\n")
            sys.stderr.flush()
        if over.any():
            break
    opened.session.counts()  # raises if a launch gave up
    found = {"launches": done, "seconds": took, "bytes": int(bad), "judged": [w for w in wrong if w], "extra": opened.extra_exchanges()}
    opened.close()
    return found


# ---------------------------------------------------------------------------------------------------- faults


def raised(call):
    """What a call, or a look at the session after it, raised."""
    try:
        call()
    except MegaMoEError as error:
        return error
    return None


def facts(error, start):
    """What a test has to know of an error."""
    names = ("rank", "site", "expected", "seen")
    return {"kind": type(error).__name__, "seconds": time.monotonic() - start, **{name: getattr(error, name, None) for name in names}}


FAULTS = ("skips", "comes late", "stalls on the device", "rejects its input")


def faults(rank, mode, count, deadline):
    """In turn, every rank does every thing that its peers must survive: for each fault what this rank raised, and what was wrong after."""
    opened, found = Opened(rank, problem_of(), mode, seed=2), []
    session = opened.session

    def good():
        inputs = opened.inputs(20)
        return opened.judged(inputs, opened.call(inputs))

    def launch_and_look():
        opened.call(opened.inputs(20))
        session.counts()

    def late():
        time.sleep(1.5 * deadline)
        launch_and_look()

    def stalled():
        torch.cuda._sleep(int(1.5 * deadline * 2e9))  # clock cycles, at most 2 GHz
        launch_and_look()

    def rejected():
        bad = torch.zeros(1, 7, dtype=torch.bfloat16, device=opened.device)
        with pytest.raises(InvalidInput):
            session.run(bad, *opened.inputs(1)[1:])
        launch_and_look()

    does = dict(zip(FAULTS, (lambda: None, late, stalled, rejected), strict=True))
    for number in range(count):
        victim, kind = number % opened.ranks, FAULTS[number // opened.ranks % len(FAULTS)]
        opened.meet()
        start = time.monotonic()
        error = raised(does[kind] if opened.rank == victim else launch_and_look)
        seen = facts(error, start)
        session.reset()
        opened.meet()
        found.append({"victim": victim, "fault": kind, **seen, "afterwards": good()})
    opened.close()
    return found


WAYS = ("returns", "killed", "killed before its launch starts", "killed in a kernel")


def leaves(rank, mode, way, folder):
    """The last rank leaves for good, between launches or with one under way; the others write what they saw into ``folder``."""
    opened = Opened(rank, problem_of(), mode, seed=3)
    victim = opened.rank == opened.ranks - 1
    first = opened.inputs(8)
    wrong = opened.judged(first, opened.call(first))
    torch.cuda.synchronize()
    opened.meet()
    if victim:
        if way == "killed before its launch starts":
            torch.cuda._sleep(int(2e9))
        if way in WAYS[2:]:
            opened.call(opened.inputs(8))  # in a kernel it waits for rank 0, which launches later
            time.sleep(0.1)
        if way == "returns":
            return
        os.kill(os.getpid(), signal.SIGKILL)
    if opened.rank == 0 or way in WAYS[:2]:
        time.sleep(0.3)
    for _ in range(2):  # a launch that was killed late had sent all that the others needed
        start = time.monotonic()
        error = raised(lambda: (opened.call(opened.inputs(8)), opened.session.counts()))
        if error:
            break
    lost = facts(error, start)
    start = time.monotonic()
    reset = facts(raised(opened.session.reset), start)
    start = time.monotonic()
    opened.session.close()
    closed = time.monotonic() - start
    alive = float(torch.ones(3, device=opened.device).sum())
    seen = {"wrong": wrong, "lost": lost, "reset": reset, "closed": closed, "alive": alive}
    Path(folder, f"{rank}.json").write_text(json.dumps(seen))
