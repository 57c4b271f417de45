"""Runs device code of megamoe on the CPU: every lane of every warp is a thread, one runs at a time, and who is next is drawn at random.

The modules of ``megamoe.device`` are loaded a second time over stand-ins for CuTe DSL: 32- and 64-bit words that wrap, warp collectives,
barriers, and the PTX instructions that the wrappers of ``memory.py`` and ``peers.py`` name.

Memory is weak: what a lane stores is seen by its own block; by the other blocks of its GPU after a release at gpu scope or a fence in its
block, by other GPUs after a fence at system scope on its GPU, and besides now and then by chance. Words that are stored as relaxed or
atomic are seen by all at once. So a missing release or fence shows as an old value. Loads always see the newest that they may see: missing
acquires do not show here.
"""

import importlib
import random
import struct
import sys
import threading
import types
from unittest import mock

LANES = 32


class Stuck(Exception):
    """No lane can go on."""


class Word(int):
    """A signed integer that wraps."""

    bits = 32

    def __new__(cls, value=0):
        value = int(value) & ((1 << cls.bits) - 1)
        return super().__new__(cls, value - (1 << cls.bits) if value >> (cls.bits - 1) else value)

    def _wider(self, other):
        return type(other) if isinstance(other, Word) and other.bits > self.bits else type(self)


def _operator(name):
    plain = getattr(int, name)

    def method(self, other):
        return self._wider(other)(plain(int(self), int(other)))

    return method


for _name in ("add", "sub", "mul", "floordiv", "mod", "and", "or", "xor", "lshift", "rshift"):
    setattr(Word, f"__{_name}__", _operator(f"__{_name}__"))
    setattr(Word, f"__r{_name}__", _operator(f"__r{_name}__"))
Word.__neg__ = lambda self: type(self)(-int(self))


class Int32(Word):
    bits = 32


class Int64(Word):
    bits = 64


class Pointer:
    """Into an array of int32 in shared memory."""

    def __init__(self, array, index=0):
        self.array, self.index = array, int(index)

    def __add__(self, offset):
        return Pointer(self.array, self.index + int(offset))


class View:
    """A tensor over shared memory."""

    def __init__(self, pointer):
        self.array, self.first = pointer.array, pointer.index

    def __getitem__(self, index):
        return Int32(self.array[self.first + int(index)])

    def __setitem__(self, index, value):
        self.array[self.first + int(index)] = int(Int32(value))


class Barrier:
    """An mbarrier for one arrival a phase and bytes in flight."""

    def __init__(self):
        self.parity, self.bytes, self.arrived = 0, 0, False

    def add(self, amount, arrived):
        self.bytes += int(amount)
        self.arrived |= arrived
        if self.arrived and self.bytes == 0:
            self.parity, self.arrived = self.parity ^ 1, False


class Meeting:
    """Lanes that wait for each other and exchange values."""

    def __init__(self):
        self.kind, self.lanes = None, {}


class Lane:
    """One thread of the simulated GPU."""

    def __init__(self, machine, body, place, warp, number, cta, lane):
        self.machine, self.body, self.place = machine, body, place
        self.warp, self.number, self.cta, self.lane = warp, number, cta, lane
        self.turn, self.blocked, self.answer = threading.Semaphore(0), "", None
        self.thread = threading.Thread(target=self._main, daemon=True)

    def _main(self):
        self.turn.acquire()
        error = None
        try:
            if not self.machine.over:
                self.body(self)
        except _Over:
            pass
        except BaseException as caught:  # noqa: BLE001
            error = caught
        self.machine.finished(self, error)


class _Over(BaseException):
    """The machine stops: a lane has failed."""


class Machine:
    """Memory and lanes.

    Args:
        seed: of the order in which lanes run.
        nbytes: of global memory.
    """

    def __init__(self, seed, nbytes=1 << 22):
        self.rng = random.Random(seed)
        self.memory, self.top = bytearray(b"\xcd" * nbytes), 4096
        self.runnable, self.alive, self.meetings = [], set(), {}
        self.current, self.over, self.error, self.steps = None, False, None, 0
        self.done = threading.Semaphore(0)
        self.bulk_loads = []
        self.in_block, self.in_gpu = {}, {}  # what others do not see yet: block or GPU -> {address: 4 bytes}

    def allocate(self, nbytes, zero=False):
        at, self.top = self.top, self.top + -(-nbytes // 256) * 256
        assert self.top <= len(self.memory)
        if zero:
            self.memory[at : self.top] = bytes(self.top - at)
        return at

    def load(self, address, nbytes):
        """What the current lane sees."""
        block, gpu = self.in_block.get(self.current.cta), self.in_gpu.get(self.current.place)
        if not block and not gpu:
            return bytes(self.memory[address : address + nbytes])
        found = bytearray(self.memory[address : address + nbytes])
        for at in range(address, address + nbytes, 4):
            for hidden in (gpu, block):
                if hidden and at in hidden:
                    found[at - address : at - address + 4] = hidden[at]
        return bytes(found)

    def store(self, address, data):
        """A plain store of the current lane."""
        assert address % 4 == 0
        assert len(data) % 4 == 0
        if self.rng.random() < 0.02:
            self.write(address, data)
            return
        hidden = self.in_block.setdefault(self.current.cta, {})
        for i in range(0, len(data), 4):
            hidden[address + i] = bytes(data[i : i + 4])

    def write(self, address, data):
        """A store that all see at once."""
        for hidden in (self.in_block.get(self.current.cta), self.in_gpu.get(self.current.place)):
            for at in range(address, address + len(data), 4):
                if hidden:
                    hidden.pop(at, None)
        self.memory[address : address + len(data)] = data

    def release(self, *, to_all):
        """Show what the current lane's block has stored to its GPU, or to all with everything else that this GPU knows."""
        block, gpu = self.in_block.pop(self.current.cta, {}), self.in_gpu.setdefault(self.current.place, {})
        gpu.update(block)
        if to_all:
            self._show(gpu)

    def launch_ended(self, place, blocks):
        """The end of a launch releases everything."""
        gpu = self.in_gpu.setdefault(place, {})
        for block in blocks:
            gpu.update(self.in_block.pop(block, {}))
        self._show(gpu)

    def _show(self, hidden):
        for at, data in hidden.items():
            self.memory[at : at + 4] = data
        hidden.clear()

    def start(self, lanes):
        for lane in lanes:
            self.alive.add(lane)
            self.runnable.append(lane)
            lane.thread.start()

    def run(self):
        """Until every lane has ended."""
        previous = threading.stack_size(256 * 1024)
        try:
            if self.runnable:
                self._next().turn.release()
                self.done.acquire()
        finally:
            threading.stack_size(previous)
        if self.error is not None:
            raise self.error

    def finished(self, lane, error):
        self.alive.discard(lane)
        if lane in self.runnable:
            self.runnable.remove(lane)
        if error is None and not self.over:
            try:
                lane.place.ended(lane)
            except Exception as caught:  # noqa: BLE001  raised by run
                error = caught
        if error is not None and self.error is None:
            self.error, self.over = error, True
        self._hand_on()

    def _hand_on(self):
        if not self.alive:
            self.done.release()
        elif self.over:
            next(iter(self.alive)).turn.release()
        elif self.runnable:
            self._next().turn.release()
        else:
            waits = sorted({f"{lane.place} {lane.blocked}" for lane in self.alive})
            self.error, self.over = Stuck("; ".join(waits)), True
            next(iter(self.alive)).turn.release()

    def _next(self):
        # A lane that spins should not keep the others from running, and a random one now and then shakes the order.
        self.steps += 1
        self.current = self.runnable[self.rng.randrange(len(self.runnable))]
        return self.current

    def pause(self):
        """Let another lane run."""
        lane = self.current
        other = self._next()
        if other is not lane:
            other.turn.release()
            lane.turn.acquire()
            self._check(lane)

    def meet(self, key, kind, count, value):
        """Wait until ``count`` lanes are here; everyone's value, by lane."""
        lane = self.current
        meeting = self.meetings.setdefault(key, Meeting())
        if meeting.lanes and meeting.kind != kind:
            raise Stuck(f"lanes of {key} meet in {meeting.kind} and in {kind}")
        meeting.kind = kind
        meeting.lanes[lane] = value
        if len(meeting.lanes) == count:
            del self.meetings[key]
            values = {other.number: v for other, v in meeting.lanes.items()}
            for other in meeting.lanes:
                other.answer = values
                if other is not lane:
                    other.blocked = ""
                    self.runnable.append(other)
            return values
        lane.blocked = f"{kind} {key}"
        self.runnable.remove(lane)
        self._hand_on()
        lane.turn.acquire()
        self._check(lane)
        return lane.answer

    def _check(self, lane):
        if self.over:
            raise _Over
        self.current = lane


LIVE: list[Machine] = []


def machine():
    return LIVE[-1]


def _warp(kind, value):
    lane = machine().current
    values = machine().meet(("warp", id(lane.warp)), kind, LANES, value)
    return lane.lane, [values[number] for number in sorted(values)]


def vote_ballot_sync(predicate):
    _, values = _warp("ballot", bool(predicate))
    return Int32(sum(1 << i for i, v in enumerate(values) if v))


def shuffle_sync(value, source):
    _, values = _warp("shuffle", (value, int(source)))
    lane = machine().current.lane
    return values[int(values[lane][1]) % LANES][0]


def shuffle_sync_up(value, delta, mask_and_clamp=0):
    lane, values = _warp("shuffle up", value)
    return values[lane - delta] if lane >= delta else value


def shuffle_sync_bfly(value, mask):
    lane, values = _warp("shuffle across", value)
    return values[lane ^ mask]


def warp_redux_sync(value, kind):
    assert kind == "add"
    return Int32(sum(_warp("redux", value)[1]))


def sync_warp():
    _warp("sync", None)


def barrier(barrier_id, number_of_threads):
    machine().meet(("barrier", id(machine().current.cta), barrier_id), "barrier", number_of_threads, None)


def sync_threads():
    barrier(0, machine().current.cta.threads)


def mbarrier_arrive_and_expect_tx(which, amount):
    which.add(amount, arrived=True)


def mbarrier_wait(which, parity):
    while which.parity == parity:
        machine().pause()


def inline_ptx(text, write_only_types=(), read_only_args=(), predicate=None):
    """The instructions that the device code uses, by name."""
    m, args = machine(), [a if isinstance(a, Pointer | Barrier) else int(a) for a in read_only_args]
    name = text.split()[0]
    if any(part in name for part in ("acquire", "relaxed", "release", "acq_rel", "nanosleep", "fence")):
        m.pause()
    if "release" in name or "acq_rel" in name:
        m.release(to_all=".sys" in name)
    if name.startswith(("fence", "nanosleep")):
        return None
    if name.startswith("cp.async.bulk.shared"):
        shared, address, size, which = args
        m.current.cta.shared[shared : shared + size] = m.load(address, size)
        m.bulk_loads.append((m.current.place, address, size))
        which.add(-size, arrived=False)
        return None
    if name.startswith("cp.async.bulk.global"):
        address, shared, size = args
        m.store(address, m.current.cta.shared[shared : shared + size])
        return None
    if ".shared." in name:
        pointer, amount = args[0], args[1] if len(args) > 1 else 1
        old = pointer.array[pointer.index]
        pointer.array[pointer.index] = int(Int32(old + amount))
        return Int32(old)
    size = 8 if ".b64" in name else 4
    kind, form = (Int64, "q") if size == 8 else (Int32, "i")
    count = int(name.split(".v")[1][0]) if ".v" in name else 1
    found = struct.unpack(f"<{count}{form}", m.load(args[0], size * count))
    if name.startswith("ld."):
        return kind(found[0]) if count == 1 else tuple(map(kind, found))
    if name.startswith("st."):
        values = args[1:]
    elif ".add" in name:
        values = [found[0] + args[1]]
    elif ".or" in name:
        values = [found[0] | args[1]]
    else:
        assert ".exch" in name, name
        values = [args[1]]
    data = struct.pack(f"<{count}{form}", *[int(kind(value)) for value in values])
    if name.startswith("st.global"):
        m.store(args[0], data)
    else:
        m.write(args[0], data)
    return kind(found[0])


def _stand_ins():
    arch = types.SimpleNamespace(
        inline_ptx=inline_ptx,
        vote_ballot_sync=vote_ballot_sync,
        shuffle_sync=shuffle_sync,
        shuffle_sync_up=shuffle_sync_up,
        shuffle_sync_bfly=shuffle_sync_bfly,
        warp_redux_sync=warp_redux_sync,
        sync_warp=sync_warp,
        sync_threads=sync_threads,
        barrier=barrier,
        popc=lambda value: Int32((int(value) & 0xFFFFFFFF).bit_count()),
        lanemask_lt=lambda: (1 << machine().current.lane) - 1,
        globaltimer=lambda: Int64(machine().steps << 16),
        block_idx=lambda: (machine().current.cta.number, 0, 0),
        mbarrier_arrive_and_expect_tx=mbarrier_arrive_and_expect_tx,
        mbarrier_wait=mbarrier_wait,
        cp_async_bulk_commit_group=lambda: None,
        cp_async_bulk_wait_group=lambda _: None,
    )
    cute = types.ModuleType("cutlass.cute")
    cute.jit, cute.arch, cute.Pointer, cute.Tensor = (lambda f: f), arch, Pointer, object
    cute.make_layout, cute.make_tensor = (lambda shape: shape), (lambda pointer, _: View(pointer))
    cute.math = types.SimpleNamespace()
    cutlass = types.ModuleType("cutlass")
    cutlass.cute, cutlass.Constexpr, cutlass.Int32, cutlass.Int64, cutlass.Float32 = cute, object, Int32, Int64, float
    cutlass.min, cutlass.max, cutlass.range_constexpr, cutlass.const_expr = min, max, range, (lambda value: value)
    cutlass.range = lambda *bounds, unroll=1: map(Int32, range(*map(int, bounds)))
    return {"cutlass": cutlass, "cutlass.cute": cute}


def device_modules(*names):
    """Modules of ``megamoe.device`` over the stand-ins, by name; those that other code has loaded are left alone."""
    prefix = "megamoe.device"
    kept = {name: module for name, module in sys.modules.items() if not name.startswith(f"{prefix}.")}
    package = importlib.import_module(prefix)
    before = dict(vars(package))
    try:
        with mock.patch.dict(sys.modules, {**kept, **_stand_ins()}, clear=True):
            found = {name: importlib.import_module(f"{prefix}.{name}") for name in names}
    finally:
        vars(package).clear()
        vars(package).update(before)
    return found
