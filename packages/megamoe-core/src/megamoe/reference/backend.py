"""The reference backend: what it can do, and how its sessions are opened."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from megamoe import __version__, nvml
from megamoe.ep.confighash import agree, configuration, reject
from megamoe.ep.group import Group
from megamoe.errors import InvalidInput, UnsupportedProblem
from megamoe.formats import describe
from megamoe.packing import check_session, expert_bytes
from megamoe.protocol import BackendSpec, PackedWeights, Plan, Reason, Region, Verdict
from megamoe.reference import SPEC
from megamoe.reference.session import ReferenceSession
from megamoe.reference.weights import ReferenceWeights

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from megamoe.problem import MoEProblem
    from megamoe.weights import ExpertWeights


class ReferenceBackend:
    """Computes any problem on any device in plain torch. See :class:`megamoe.protocol.Backend`.

    Sessions run where the weights are. Expert parallelism uses the group's own library: NCCL for weights on a GPU, gloo otherwise.
    """

    @property
    def spec(self) -> BackendSpec:
        return SPEC

    def probe(self, device: torch.device | None = None) -> Verdict:
        gpus = nvml.gpus()
        if device is None or device.type != "cuda" or len(gpus.devices) > (device.index or 0):
            return Verdict()
        found = f"{len(gpus.devices)} GPUs are visible" if gpus.devices else f"no GPU is visible: {gpus.problem}"
        return Verdict((Reason(f"device {device} is asked for, and {found}", "device='cpu'"),))

    def supports(self, problem: MoEProblem, ranks: int = 1) -> Verdict:
        info = describe(problem.format)
        blocks = [
            Reason(f"{name}={size} is not a multiple of {info.multiple}, as format {info.name} needs", f"pad {name}, or use format bf16")
            for name, size in (("hidden", problem.hidden), ("intermediate", problem.intermediate))
            if size % info.multiple
        ]
        return Verdict((*blocks, *problem.placement_reasons(ranks)))

    def plan(self, problem: MoEProblem, *, ranks: int = 1, knobs: Mapping[str, object] | None = None) -> Plan:
        if knobs:
            raise InvalidInput(f"knobs {sorted(knobs)}; allowed: the reference backend has none.", hint="drop knobs")
        verdict = self.supports(problem, ranks)
        if not verdict:
            raise UnsupportedProblem(verdict.reasons, subject="The reference backend does not support this problem")
        most = max(map(len, problem.resolved_placement(ranks).local))
        weights = Region("weights", most * expert_bytes(problem), "local", "encoded experts, without biases")
        return Plan(SPEC.name, __version__, problem, ranks, regions=(weights,), properties=("sums in slot order",))

    def prepare_weights(self, plan: Plan, weights: ExpertWeights) -> ReferenceWeights:
        return ReferenceWeights(plan, weights)

    def open_session(self, plan: Plan, packed: PackedWeights, group: ProcessGroup | None = None) -> ReferenceSession:
        ours = Group.of(group)
        if not isinstance(packed, ReferenceWeights):
            raise InvalidInput(
                f"packed is {type(packed).__name__}; allowed: what this backend's prepare_weights returned.",
                hint="call prepare_weights of the same backend",
            )
        try:
            check_session(plan, packed, ours)
        except BaseException as error:
            reject(ours, error, packed.device)
            raise
        agree(ours, configuration(plan, x_scale=packed.x_scale, mid_scale=packed.mid_scale), packed.device)
        return ReferenceSession(plan, packed, ours)
