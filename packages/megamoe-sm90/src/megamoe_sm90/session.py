"""An open session of the sm90 backend on one rank."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Self

import torch

from megamoe import env
from megamoe.errors import InvalidInput, PeerTimeout, SessionClosed
from megamoe.inputs import check_inputs, find_bad_ids, raise_bad_ids
from megamoe_sm90.shim.knobs import variants_of
from megamoe_sm90.shim.launch import Launcher
from megamoe_sm90.shim.variants import Operands
from megamoe_sm90.shim.workspace import FailedWait, Workspace

if TYPE_CHECKING:
    from megamoe.protocol import Plan
    from megamoe_sm90.shim.weights import Sm90Weights

_ALIGNMENT = 16


class Sm90Session:
    """See :class:`megamoe.protocol.Session`. Made by ``Sm90Backend.open_session``.

    Calls may come from any stream; each is ordered behind the previous one. With ``out`` given and arguments that are contiguous and
    16-byte aligned, a call neither allocates nor synchronizes nor reads the environment; other arguments are copied first. It can be
    captured in a CUDA graph: the kernel is chosen by the rows of ``x`` at capture, and rows whose ids are all -1 cost no more than their
    zeros. Replays are not calls: order them behind calls and replays on other streams yourself. Quantized activations have kernels of their
    own, compiled or loaded by the first call that brings some; it is refused while a stream is captured.

    A kernel that passed a deadline and ids out of range are reported by the next call after the launch has finished on the device, graph
    replays included. After :class:`PeerTimeout` the session refuses work until :meth:`reset`.
    """

    def __init__(self, plan: Plan, weights: Sm90Weights) -> None:
        self._plan = plan
        self._problem = plan.problem
        self._weights: Sm90Weights | None = weights
        self._device = weights.device
        self._seconds = env.timeout_seconds()
        self._failure: FailedWait | None = None
        self._ids: torch.Tensor | None = None
        self._launchers: dict[bool, Launcher] = {}
        sms = multiprocessors(self._device)
        biases = {name: name in weights.tensors for name in ("b13", "b2")}
        self._variants = {
            quantized: variants_of(self._problem, plan.detail, Operands(quantized=quantized, sms=sms, **biases))
            for quantized in (False, True)
        }
        routes = (self._problem.max_tokens, self._problem.top_k)
        # Memory that later calls write, also those outside of an inference mode that the session was opened in.
        with torch.cuda.device(self._device), torch.inference_mode(False):
            # Kernels that take bf16 need the larger workspace: they write quantized activations into it.
            self._workspace = Workspace(self._variants[False], self._device)
            self._ids64 = torch.empty(routes, dtype=torch.int64, device=self._device)
            self._ids32 = torch.empty(routes, dtype=torch.int32, device=self._device)
            self._weights32 = torch.empty(routes, dtype=torch.float32, device=self._device)
            self._stream = torch.cuda.current_stream(self._device)
            self._launcher(quantized=False)

    @property
    def plan(self) -> Plan:
        return self._plan

    def run(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        *,
        x_scale: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        self._check(x, topk_ids, topk_weights, x_scale, out)
        tokens = x.shape[0]
        y = torch.empty(tokens, self._problem.hidden, dtype=torch.bfloat16, device=self._device) if out is None else out
        self._ids = topk_ids
        if not tokens:
            return y
        if torch.cuda.current_device() != self._device.index:
            with torch.cuda.device(self._device):
                self._launch(tokens, x, topk_ids, topk_weights, x_scale, y)
        else:
            self._launch(tokens, x, topk_ids, topk_weights, x_scale, y)
        return y

    def counts(self) -> torch.Tensor:
        """See the protocol. Counts the ids tensor of the last call as it is now, so ask before overwriting it."""
        self._open()
        torch.cuda.synchronize(self._device)
        self._raise_reported()
        experts = self._problem.experts
        if self._ids is None:
            return torch.zeros(experts, dtype=torch.int64, device="cpu")
        ids = self._ids.flatten().cpu().to(torch.int64)
        return torch.bincount(ids[(ids >= 0) & (ids < experts)], minlength=experts)

    def reset(self) -> None:
        self._open()
        self._workspace.reset()
        self._failure = None

    def close(self) -> None:
        if self._weights is not None:
            # Memory goes back to torch's allocator, which knows of work on the streams that it was used on only.
            torch.cuda.synchronize(self._device)
            self._weights = None
            self._launchers.clear()
            del self._workspace, self._ids64, self._ids32, self._weights32

    def __enter__(self) -> Self:
        self._open()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _check(
        self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, x_scale: torch.Tensor | None, out: torch.Tensor | None
    ) -> None:
        self._open()
        self._raise_reported()
        check_inputs(self._problem, self._device, x, topk_ids, topk_weights, x_scale=x_scale, out=out)
        if self._problem.checked:
            raise_bad_ids(find_bad_ids(topk_ids, self._problem.experts), self._problem)

    def _launch(
        self, tokens: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, scale: torch.Tensor | None, out: torch.Tensor
    ) -> None:
        stream = torch.cuda.current_stream(self._device)
        # A captured call runs when its graph is replayed, so the next eager call still comes behind the last eager one.
        if stream != self._stream and not torch.cuda.is_current_stream_capturing():
            stream.wait_stream(self._stream)
            self._workspace.used_on(stream)
            for buffer in (self._ids64, self._ids32, self._weights32):
                buffer.record_stream(stream)
            self._stream = stream
        launcher = self._launcher(quantized=x.dtype != torch.bfloat16)
        x, scale = _plain(x), None if scale is None else _plain(scale)
        target = out if _is_plain(out) else torch.empty(out.shape, dtype=out.dtype, device=out.device)
        ids = ids.contiguous() if ids.dtype == torch.int32 else self._narrow(ids)
        weights = weights.contiguous() if weights.dtype == torch.float32 else self._weights32[:tokens].copy_(weights.detach())
        scale_address = 0 if scale is None else scale.data_ptr()
        launcher.run(tokens, x.data_ptr(), scale_address, ids.data_ptr(), weights.data_ptr(), target.data_ptr(), stream.cuda_stream)
        if target is not out:
            out.copy_(target)

    def _narrow(self, ids: torch.Tensor) -> torch.Tensor:
        """int64 ids as the kernels read them; those out of range stay out of range, also beyond 32 bits."""
        tokens = ids.shape[0]
        clamped = torch.clamp(ids, -2, self._problem.experts, out=self._ids64[:tokens])
        return self._ids32[:tokens].copy_(clamped)

    def _launcher(self, *, quantized: bool) -> Launcher:
        launcher = self._launchers.get(quantized)
        if launcher is None:
            if torch.cuda.is_current_stream_capturing():  # loading a module and its first launch would break or join the capture
                raise InvalidInput(
                    "the first call with quantized x is being captured, and its kernels are not loaded yet; allowed: capture later calls.",
                    hint="call once with quantized x before capturing",
                )
            launcher = Launcher(self._plan.detail, self._variants[quantized], self._open(), self._workspace, self._seconds)
            launcher.warm_up(self._ids32.data_ptr(), torch.cuda.current_stream(self._device).cuda_stream)
            self._launchers[quantized] = launcher
        return launcher

    def _raise_reported(self) -> None:
        if self._failure is None and self._workspace.aborted:
            self._failure = self._workspace.failed_wait()
        if self._failure is not None:
            raise _timeout(self._failure, self._seconds)
        if self._workspace.take_bad_ids():
            if self._ids is not None:
                raise_bad_ids(find_bad_ids(self._ids, self._problem.experts), self._problem, call="an earlier call")
            raise InvalidInput(
                f"topk_ids of an earlier call had ids out of range; allowed: 0 to {self._problem.experts - 1}, and -1 for no route.",
                hint="check the router; pass -1 for padding",
            )

    def _open(self) -> Sm90Weights:
        if self._weights is None:
            raise SessionClosed("The session was closed.", hint="open another one with backend.open_session(plan, packed, group)")
        return self._weights


def multiprocessors(device: torch.device) -> int:
    """How many this process may use: fewer than the GPU has where it is shared (MPS)."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def _timeout(failed: FailedWait, seconds: float) -> PeerTimeout:
    return PeerTimeout(
        f"A wait inside the kernel passed its deadline of {seconds:g} s in block {failed.cta}, counter {failed.index}; "
        "the results of that call are not valid",
        rank=0,
        site=failed.site,
        expected=failed.expected,
        seen=failed.seen,
        hint=f"session.reset(), then try again; a larger {env.TIMEOUT.name} where another process holds the GPU",
    )


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and tensor.data_ptr() % _ALIGNMENT == 0


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as kernels read it: contiguous and aligned; a copy where it is not."""
    return tensor if _is_plain(tensor) else tensor.clone(memory_format=torch.contiguous_format)
