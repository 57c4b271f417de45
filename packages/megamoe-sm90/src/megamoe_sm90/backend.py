"""The sm90 backend: what it can do, what it would run, and how its sessions are opened."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from megamoe.bench.roof import H200
from megamoe.compile import KernelRequest, sources
from megamoe.device.wire import WIRES
from megamoe.ep.confighash import agree, configuration, reject
from megamoe.ep.group import Group
from megamoe.errors import InvalidInput, UnsupportedProblem
from megamoe.formats import describe
from megamoe.packing import check_session, expert_bytes
from megamoe.problem import MAX_TOP_K, Placement
from megamoe.protocol import BackendSpec, PackedWeights, Plan, Reason, Region, Verdict
from megamoe.tune import Space
from megamoe_sm90 import SPEC, __version__, ranks_plan
from megamoe_sm90.session import Sm90Session
from megamoe_sm90.shim.knobs import AUTO, SPACE, ladder, variants_of
from megamoe_sm90.shim.variants import NATIVE_CLAIMS, PACKAGES, SMS, Operands, sizes
from megamoe_sm90.shim.weights import Sm90Weights

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from megamoe.problem import MoEProblem
    from megamoe.weights import ExpertWeights

MOST_EXPERTS = 512
_PURPOSES = {
    "scratch": "quantized activations, row lists, intermediate rows, results of routes",
    "native control": "counters of the native-order kernels",
    "swap control": "counters of the swap-order kernels",
}


class Sm90Backend:
    """One persistent launch a call on a Hopper GPU. See :class:`megamoe.protocol.Backend`; also
    :class:`megamoe.compile.Precompiles` and :class:`megamoe.tune.Tunable`."""

    @property
    def spec(self) -> BackendSpec:
        return SPEC

    def probe(self, device: torch.device | None = None) -> Verdict:
        import torch

        reasons = []
        if find_spec("cutlass") is None:
            reasons.append(Reason("CuTe DSL (nvidia-cutlass-dsl) is not installed", 'pip install "megamoe-core[sm90]"'))
        if device is not None and device.type != "cuda":
            reasons.append(
                Reason(f"the device is {device}, these kernels need a GPU", "move the weights to the GPU, or backend='reference'")
            )
        elif not torch.cuda.is_available():
            build = "has no CUDA support" if torch.version.cuda is None else "sees no GPU"
            reasons.append(Reason(f"torch {torch.__version__} {build}", "install a CUDA build of torch; megamoe doctor"))
        elif (capability := torch.cuda.get_device_capability(device)) != (9, 0):
            found = f"{capability[0]}.{capability[1]}"
            reasons.append(Reason(f"the device has compute capability {found}, these kernels need 9.0", "use the backend of this GPU"))
        return Verdict(tuple(reasons))

    def supports(self, problem: MoEProblem, ranks: int = 1) -> Verdict:
        reasons = list(problem.placement_reasons(ranks))
        if not reasons:  # else it is not known which experts a rank holds
            if ranks > 1:
                reasons += ranks_plan.reasons(problem, ranks, MOST_EXPERTS)
            elif problem.placement not in (None, Placement.even(problem.experts, 1)):
                reasons.append(Reason("the placement reorders experts on one rank", "leave placement at None"))
        if problem.format not in SPEC.formats:
            reasons.append(Reason(f"format {problem.format} has no sm90 kernel", f"use one of {', '.join(SPEC.formats)}"))
        multiple = max(64, describe(problem.format).multiple)
        for name, size in (("hidden", problem.hidden), ("intermediate", problem.intermediate)):
            if size % multiple:
                reasons.append(Reason(f"{name}={size} is not a multiple of {multiple}", f"pad {name} with zeros, or backend='reference'"))
        if ranks == 1 and problem.experts > MOST_EXPERTS:
            reasons.append(Reason(f"{problem.experts} experts; at most {MOST_EXPERTS} on a rank", "spread them over ranks"))
        assert problem.top_k <= MAX_TOP_K
        return Verdict(tuple(reasons))

    def plan(self, problem: MoEProblem, *, ranks: int = 1, knobs: Mapping[str, object] | None = None) -> Plan:
        values = SPACE.complete(knobs)
        verdict = self.supports(problem, ranks)
        if not verdict:
            raise UnsupportedProblem(verdict.reasons, subject="The sm90 backend does not support this problem")
        parts = self._several(problem, ranks, values) if ranks > 1 else self._one(problem, values)
        wire = SPACE.wire(values)
        return Plan(backend=SPEC.name, version=__version__, problem=problem, ranks=ranks, knobs=values, wire=wire, **parts)

    def _one(self, problem: MoEProblem, values: Mapping[str, object]) -> dict[str, Any]:
        """What a plan for one rank says beside what all say."""
        if values["ring"] != AUTO:
            raise InvalidInput(
                f"knob ring={values['ring']!r} on one rank; allowed: {AUTO!r}.", hint="rows travel, and need a ring, on several ranks alone"
            )
        if values["stage"] != AUTO:
            raise InvalidInput(
                f"knob stage={values['stage']!r} on one rank; allowed: {AUTO!r}.", hint="rows wait for their groups on several ranks alone"
            )
        if values["wire"] != WIRES[0]:
            raise InvalidInput(
                f"knob wire={values['wire']!r} on one rank; allowed: {WIRES[0]!r}.", hint="nothing crosses a wire on one rank: drop it"
            )
        rungs = ladder(problem, values)
        variants = variants_of(problem, rungs, Operands())
        memory = [Region(name, nbytes, "local", _PURPOSES[name]) for name, nbytes in sizes(variants).items()]
        weights, math = _bounds(problem)
        return {
            "regions": (Region("weights", problem.experts * expert_bytes(problem), "local", "experts, without biases"), *memory),
            "budgets": {f"shared memory of {v.order}-{v.tile}": v.shared_bytes for v in variants},
            "bounds": {"all weights once": weights, "products of max_tokens": math},
            "properties": ("bitwise repeatable", *(f"up to {r.tokens} tokens: {r.order} order, tile {r.tile}" for r in rungs)),
            "detail": rungs,
        }

    def _several(self, problem: MoEProblem, ranks: int, values: Mapping[str, object]) -> dict[str, Any]:
        """The same for several ranks."""
        choice = ranks_plan.choice_of(values)
        variant = ranks_plan.variant(problem, ranks, choice)
        config = variant.config
        weights, math = _bounds(problem)
        return {
            "regions": ranks_plan.regions(problem, variant),
            "budgets": {f"shared memory of native-{config.tile_m} on {ranks} ranks": config.shared_bytes},
            "bounds": {"all weights once": weights * config.experts / problem.experts, "products of max_tokens": math},
            "properties": ranks_plan.properties(choice),
            "detail": choice,
        }

    def prepare_weights(self, plan: Plan, weights: ExpertWeights) -> Sm90Weights:
        return Sm90Weights(plan, weights)

    def open_session(self, plan: Plan, packed: PackedWeights, group: ProcessGroup | None = None) -> Sm90Session:
        ours = Group.of(group)
        if not isinstance(packed, Sm90Weights):
            raise InvalidInput(
                f"packed is {type(packed).__name__}; allowed: what this backend's prepare_weights returned.",
                hint="call prepare_weights of the same backend",
            )
        try:
            check_session(plan, packed, ours)
            if packed.device.type != "cuda":
                raise InvalidInput(f"the weights lie on {packed.device}; allowed: a CUDA device.", hint="move the weights to the GPU first")
        except BaseException as error:
            reject(ours, error, packed.device)
            raise
        config = configuration(plan, drop=sources.loaded(PACKAGES), x_scale=packed.x_scale, mid_scale=packed.mid_scale)
        agree(ours, config, packed.device)
        if ours.size > 1:
            from megamoe_sm90.ranks_session import Sm90RanksSession

            return Sm90RanksSession(plan, packed, ours)
        return Sm90Session(plan, packed)

    @property
    def space(self) -> Space:
        """See :class:`megamoe.tune.Tunable`."""
        return SPACE

    def kernel(self, plan: Plan, tokens: int) -> str:
        """See :class:`megamoe.tune.Tunable`."""
        early = "pdl" if plan.knobs["pdl"] else ""
        if plan.ranks > 1:
            return "-".join(filter(None, (f"ranks-{ranks_plan.variant(plan.problem, plan.ranks, plan.detail).config.tile_m}", early)))
        rung = next(rung for rung in plan.detail if tokens <= rung.tokens)
        claims = rung.claims if rung.claims != NATIVE_CLAIMS[0] else ""
        return "-".join(str(part) for part in (rung.order, rung.tile, rung.rows, claims, early) if part)

    def kernels(self, plan: Plan, arch: str | None = None, *, biases: bool = False, sms: int | None = None) -> tuple[KernelRequest, ...]:
        """See :class:`megamoe.compile.Precompiles`; 132 multiprocessors unless told. Kernels in swap order suit any number of them."""
        count = SMS if sms is None else sms
        if count < 1:
            raise InvalidInput(f"sms is {count}; allowed: 1 or more.", hint="pass the number of multiprocessors of the GPU")
        kinds = (False, True)[: 1 if describe(plan.problem.format).element == "bf16" else 2]
        operands = [Operands(quantized=q, b13=biases, b2=biases and plan.problem.routing_weight == "late", sms=count) for q in kinds]
        if plan.ranks > 1:
            return tuple(ranks_plan.variant(plan.problem, plan.ranks, plan.detail, one).request(arch) for one in operands)
        return tuple(variant.request(arch) for one in operands for variant in variants_of(plan.problem, plan.detail, one))


def _bounds(problem: MoEProblem) -> tuple[float, float]:
    """Microseconds on an H200: reading every expert once, and forming all products of ``max_tokens``."""
    rate = H200.bf16_tflops if problem.format == "bf16" else H200.fp8_tflops
    products = 6 * problem.max_tokens * problem.top_k * problem.hidden * problem.intermediate
    return problem.experts * expert_bytes(problem) / H200.read_tb_s * 1e-6, products / rate * 1e-6
