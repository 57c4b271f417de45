"""What a session of one rank does on the host around its launches: streams, captures and late reports. Needs no GPU."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from megamoe import InvalidInput, MoEProblem, PeerTimeout
from megamoe.device import regions
from megamoe.testing.trial import make_trial
from megamoe_sm90 import session as module
from megamoe_sm90.backend import Sm90Backend
from megamoe_sm90.session import Sm90Session
from megamoe_sm90.shim.workspace import FailedWait


class Stream:
    def __init__(self, number):
        self.cuda_stream, self.waited = number, []

    def wait_stream(self, other):
        self.waited.append(other.cuda_stream)


class Buffer:
    """Device memory as the session and torch's allocator see it."""

    def __init__(self, tensor):
        self.tensor, self.streams = tensor, []

    def __getitem__(self, index):
        return self.tensor[index]

    def record_stream(self, stream):
        self.streams.append(stream.cuda_stream)


class Gpu:
    """The calls of torch.cuda that a launch makes."""

    def __init__(self, monkeypatch):
        self.stream, self.capturing = Stream(1), False
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.stream)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: None)


@pytest.fixture
def gpu(monkeypatch):
    return Gpu(monkeypatch)


def session(gpu):
    one = Sm90Session.__new__(Sm90Session)
    one._problem = MoEProblem(6, 2, 128, 128, 4, "fp8_block128")
    one._device, one._weights, one._ids, one._failure, one._seconds = torch.device("cpu"), object(), None, None, 30.0
    one._stream, one.launched = gpu.stream, []
    one._ids64, one._ids32 = (Buffer(torch.empty(4, 2, dtype=kind)) for kind in (torch.int64, torch.int32))
    one._weights32 = Buffer(torch.empty(4, 2))
    used = []
    one._workspace = SimpleNamespace(aborted=False, streams=used, used_on=lambda s: used.append(s.cuda_stream), take_bad_ids=lambda: False)
    one._launchers = {False: SimpleNamespace(run=lambda *arguments: one.launched.append(arguments))}
    return one


def call(one, tokens=2, **more):
    ids = more.pop("ids", torch.zeros(tokens, 2, dtype=torch.int32))
    return one.run(more.pop("x", torch.zeros(tokens, 128, dtype=torch.bfloat16)), ids, torch.zeros(tokens, 2), **more)


def test_a_call_on_another_stream_comes_behind_the_previous_call(gpu):
    one = session(gpu)
    call(one)
    assert gpu.stream.waited == []
    gpu.stream = Stream(2)
    call(one)
    call(one)
    assert gpu.stream.waited == [1]
    assert [arguments[-1] for arguments in one.launched] == [1, 2, 2]
    for buffer in (one._workspace, one._ids64, one._ids32, one._weights32):
        assert buffer.streams == [2]


def test_a_capture_in_between_does_not_break_the_order_of_eager_calls(gpu):
    """A captured call runs later, if ever: who waits for its stream waits for nothing."""
    one = session(gpu)
    call(one)
    gpu.stream, gpu.capturing = Stream(2), True
    call(one)
    assert gpu.stream.waited == []
    gpu.stream, gpu.capturing = Stream(3), False
    call(one)
    assert gpu.stream.waited == [1]


def test_kernels_that_are_not_loaded_are_not_captured(gpu):
    one = session(gpu)
    gpu.capturing = True
    x, scale = torch.zeros(2, 128, dtype=torch.float8_e4m3fn), torch.ones(2, 1)
    with pytest.raises(InvalidInput, match="before capturing"):
        call(one, x=x, x_scale=scale)
    one._launchers[True] = one._launchers[False]
    call(one, x=x, x_scale=scale)
    assert len(one.launched) == 1


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_counts_are_of_the_ids_as_they_came(gpu, monkeypatch, kind):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    one = session(gpu)
    assert one.counts().tolist() == [0] * 6
    call(one, ids=torch.tensor([[5, 0], [-1, 5]], dtype=kind))
    assert one.counts().tolist() == [1, 0, 0, 0, 0, 2]
    call(one, tokens=0)
    assert one.counts().tolist() == [0] * 6


def test_no_tokens_launch_nothing(gpu):
    one = session(gpu)
    assert call(one, tokens=0).shape == (0, 128)
    assert one.launched == []


def test_arguments_that_kernels_cannot_read_are_copied_and_the_result_comes_back(gpu):
    """Rows of a wider tensor, and an out at an address that is no multiple of 16."""
    one = session(gpu)
    wide = torch.zeros(2, 160, dtype=torch.bfloat16)[:, :128]
    out = torch.zeros(2 * 128 + 1, dtype=torch.bfloat16)[1:].view(2, 128)
    assert call(one, x=wide, out=out) is out
    ((tokens, x, _, _, _, target, _),) = one.launched
    assert tokens == 2
    assert x != wide.data_ptr()
    assert target != out.data_ptr()
    assert target % 16 == 0


def test_a_failed_wait_is_told_until_reset(gpu):
    one = session(gpu)
    one._workspace.aborted = True
    one._workspace.failed_wait = lambda: FailedWait("pool rows of a block", 3, 8, 5, 1)
    for _ in range(2):
        with pytest.raises(PeerTimeout, match="pool rows of a block") as caught:
            call(one)
        assert (caught.value.expected, caught.value.seen) == (8, 5)
    one._workspace.reset = lambda: setattr(one._workspace, "aborted", False)
    one.reset()
    call(one)
    assert len(one.launched) == 1


@pytest.fixture
def opened_by_an_engine(gpu, monkeypatch):
    """A session that was opened in inference mode and under a default device, as engines load models, and is used outside of both."""
    zeros = torch.zeros  # this machine's torch may have no pinned memory
    monkeypatch.setattr(torch, "zeros", lambda *shape, pin_memory=False, **more: zeros(*shape, **more))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=4))
    launched = []
    monkeypatch.setattr(
        module, "Launcher", lambda *_: SimpleNamespace(warm_up=lambda *_: None, run=lambda *arguments: launched.append(arguments))
    )
    backend, problem = Sm90Backend(), MoEProblem(6, 2, 128, 128, 4, "fp8_block128")
    plan, weights = backend.plan(problem), make_trial(problem, tokens=0).weights
    with torch.inference_mode(), torch.device("meta"):
        one = Sm90Session(plan, backend.prepare_weights(plan, weights))
        assert one.counts().device.type == "cpu"
    one.launched = launched
    return one


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_calls_outside_of_the_modes_that_the_session_was_opened_in(opened_by_an_engine, dtype):
    """Router weights that want a gradient must not hang a graph onto the session's memory, which would grow with every call."""
    one = opened_by_an_engine
    x, ids = torch.zeros(2, 128, dtype=torch.bfloat16, requires_grad=True), torch.zeros(2, 2, dtype=torch.int64)
    for _ in range(3):
        one.run(x, ids, torch.ones(2, 2, dtype=dtype, requires_grad=True))
    assert len(one.launched) == 3
    assert not one._weights32.requires_grad
    one.reset()
    with torch.inference_mode():
        one.run(x, ids, torch.ones(2, 2, dtype=dtype))
        one.reset()
    one.run(x, ids, torch.ones(2, 2, dtype=dtype))


def test_the_kernels_report_to_the_host_under_any_default_device(opened_by_an_engine):
    workspace = opened_by_an_engine._workspace
    assert workspace.report.device.type == "cpu"
    for control in workspace.controls.values():
        assert control[regions.REPORT : regions.REPORT + 8].view(torch.int64).item() == workspace.report.data_ptr()
