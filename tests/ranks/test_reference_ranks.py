"""The reference backend on several ranks over gloo, and over NCCL where there is a GPU. Processes cost more than cases, so every launch
runs many; each case reports by name.

Every rank makes the whole trial by itself (equal seeds, equal data) and judges its own output with the oracle.
"""

import os
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megamoe import ExpertWeights, InvalidInput, MoELayer, MoEProblem, PeerAborted, Placement, RankMismatch, SessionClosed, SwiGLU
from megamoe.ep.group import Group
from megamoe.formats import FORMATS
from megamoe.reference import session as session_module
from megamoe.reference.backend import ReferenceBackend
from megamoe.testing import cases, oracle, routing
from megamoe.testing.launcher import launch
from megamoe.testing.trial import make_trial

from .groups import new_group

BACKEND = ReferenceBackend()
SIZES = {"experts": 16, "top_k": 4, "hidden": 128, "intermediate": 128, "max_tokens": 24}


def problem(format="bf16", **changes):
    return MoEProblem(**SIZES | {"format": format} | changes)


@contextmanager
def opened(trial, group, device="cpu"):
    """A session of this rank's share of a trial."""
    ours = Group.of(group)
    plan = BACKEND.plan(trial.problem, ranks=ours.size)
    packed = BACKEND.prepare_weights(plan, trial.local_weights(ours.rank, device))
    with BACKEND.open_session(plan, packed, group) as s:
        yield s


def judged(trial, rank, out, ids=None):
    """What is wrong with a rank's output; "" when nothing is."""
    inputs = trial.inputs[rank] if ids is None else trial.inputs[rank]._replace(topk_ids=ids)
    verdict = oracle.judge(out, oracle.compute(trial.problem, trial.weights, *inputs), format=trial.problem.format)
    return "" if verdict else verdict.text


# ---------------------------------------------------------------------------------------------------- right results


def formats_and_forms(rank):
    """Every format, late and early, biases, uneven tokens: {case: what is wrong}."""
    ranks, wrong = dist.get_world_size(), {}
    for number, format in enumerate(FORMATS):
        for routing_weight in ("late", "early"):
            generator = torch.Generator().manual_seed(number)
            tokens = routing.uneven_tokens(ranks, 24, generator)
            made = problem(format, routing_weight=routing_weight, activation=SwiGLU(limit=7.0, alpha=1.702, up_bias=1.0))
            trial = make_trial(made, ranks=ranks, tokens=tokens, seed=60 + number, pattern="masked")
            if routing_weight == "late":
                biases = torch.randn(2, 16, 256, generator=generator)
                trial = replace(trial, weights=replace(trial.weights, b13=biases[0], b2=biases[1, :, :128].contiguous()))
            with opened(trial, dist.group.WORLD) as s:
                wrong[f"{format} {routing_weight} {tokens}"] = judged(trial, rank, s.run(*trial.inputs[rank]))
    return wrong


def routings(rank):
    """Every case of the list that all backends share."""
    trial = make_trial(problem("fp8_block128"), ranks=dist.get_world_size(), seed=70)
    with opened(trial, dist.group.WORLD) as s:
        return cases.go_through(s, trial, rank)


def placements(rank):
    """Every placement of that list, with token counts all different; few experts a rank, fewer than a token's routes."""
    ranks, wrong = dist.get_world_size(), {}
    for name, placement in cases.placements(8, ranks).items():
        trial = make_trial(cases.placed(problem("mxfp8", top_k=6), placement), ranks=ranks, seed=73)
        with opened(trial, dist.group.WORLD) as s:
            wrong |= {f"{name}: {case}": what for case, what in cases.go_through(s, trial, rank, only=["masked"]).items()}
    return wrong


def everything(rank):
    return formats_and_forms(rank) | routings(rank) | placements(rank)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_results_on_ranks(ranks):
    work = {1: everything, 2: everything, 3: placements, 4: everything}[ranks]
    for rank, wrong in enumerate(launch(work, ranks)):
        assert {case: what for case, what in wrong.items() if what} == {}, f"rank {rank}"
        assert len(wrong) >= 5


def over_nccl(rank):
    """Some of those cases on GPUs. NCCL refuses two ranks of a host on one GPU, so ranks that share one name hosts of their own."""
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    if torch.cuda.device_count() < dist.get_world_size():
        os.environ |= {"NCCL_HOSTID": f"host {rank}", "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo"}
    trial = make_trial(problem("fp8_block128"), ranks=dist.get_world_size(), seed=71)
    with opened(trial, dist.group.WORLD, device) as s:
        return cases.go_through(s, trial, rank, device, only=["zipf", "masked", "one expert"])


@pytest.mark.gpu
def test_results_over_nccl():
    for rank, wrong in enumerate(launch(over_nccl, 2, backend="cpu:gloo,cuda:nccl")):
        assert {case: what for case, what in wrong.items() if what} == {}, f"rank {rank}"
        assert len(wrong) >= 30


# ---------------------------------------------------------------------------------------------------- groups


def permuted_group(rank):
    """World ranks 3, 0, 2 in that order; 1 stays outside."""
    group, members = new_group([3, 0, 2])
    if rank not in members:
        with pytest.raises(InvalidInput, match="group") as caught:
            Group.of(group)
        return str(caught.value)
    ours = Group.of(group)
    assert (ours.rank, ours.size, ours.members) == (members.index(rank), 3, tuple(members))
    # An uneven placement: a wrong rank order would give this rank another number of experts.
    trial = make_trial(problem("nvfp4", placement=Placement.even(16, 3)), ranks=3, tokens=[5, 0, 24], seed=74)
    with opened(trial, group) as s:
        wrong = judged(trial, ours.rank, s.run(*trial.inputs[ours.rank]))
    with MoELayer(trial.problem, trial.local_weights(ours.rank), backend="reference", group=group) as layer:
        return wrong + judged(trial, ours.rank, layer(*trial.inputs[ours.rank]))


def test_a_group_smaller_than_the_world_in_another_order():
    results = launch(permuted_group, 4)
    assert results[0] == results[2] == results[3] == ""
    assert "Fix: pass the group" in results[1]


# ---------------------------------------------------------------------------------------------------- disagreement and failure


def error_of(call):
    try:
        call()
    except Exception as error:  # noqa: BLE001  the test compares it
        return type(error).__name__, str(error), getattr(error, "rank", None)
    return None


def mismatches(rank):
    """What every rank raises for each kind of disagreement when a layer is made."""
    trial = make_trial(problem("fp8_tensor"), ranks=4, seed=75)
    mine = trial.local_weights(rank)
    odd = rank == 2

    def made(problem=trial.problem, weights=mine, backend="reference"):
        return MoELayer(problem, weights, backend=backend, group=dist.group.WORLD).close()

    seen = {
        "scale": error_of(lambda: made(weights=replace(mine, x_scale=0.75) if odd else mine)),
        "problem": error_of(lambda: made(replace(trial.problem, max_tokens=25, checked=True) if odd else trial.problem)),
        "weights": error_of(lambda: made(weights=replace(mine, mid_scale=None) if odd else mine)),
        "backend": error_of(lambda: made(backend="nobody's" if odd else "reference")),
        "weights of another rank": error_of(
            lambda: made(weights=ExpertWeights(mine.w13[:1], mine.w2[:1], x_scale=1.0, mid_scale=1.0) if odd else mine)
        ),
    }
    uneven = problem(placement=Placement(((0, 1, 2, 3, 4), (5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15))))
    share = (1, 0, 2, 3)[rank]
    wrong_share = make_trial(uneven, ranks=4, seed=76).local_weights(share)
    seen["shares swapped"] = error_of(lambda: made(uneven, wrong_share))
    seen["experts that do not divide"] = error_of(lambda: made(problem(experts=15)))
    seen["fine at last"] = error_of(made)
    return seen


def test_every_disagreement_is_an_error_on_every_rank():
    results = launch(mismatches, 4)
    for case, field in (("scale", "x_scale"), ("problem", r"problem.max_tokens")):
        errors = [seen[case] for seen in results]
        assert errors[0][0] == "RankMismatch"
        assert len(set(errors)) == 1, errors
        assert f"{field} is" in errors[0][1]
        assert "on ranks [0, 1, 3]" in errors[0][1]
        assert "on ranks [2]" in errors[0][1]
    assert "problem.checked is false on ranks [0, 1, 3], true on ranks [2]" in results[0]["problem"][1]
    for case, own in (("weights", "InvalidInput"), ("backend", "BackendNotFound"), ("weights of another rank", "InvalidInput")):
        for rank, seen in enumerate(results):
            kind, text, by = seen[case]
            assert (kind, by) == ((own, None) if rank == 2 else ("PeerAborted", 2)), seen
            if rank != 2:
                assert results[2][case][1] in text
    for rank, seen in enumerate(results):
        kind, text, by = seen["shares swapped"]
        assert (kind, by) == (("InvalidInput", None) if rank in (0, 1) else ("PeerAborted", 0))
        assert f"hold {(3, 5)[rank]} experts; allowed: {(5, 3)[rank]}" in text if rank < 2 else "world rank 0 reports" in text
        assert seen["experts that do not divide"][0] == "UnsupportedProblem"
        assert "Placement.even(15, 4)" in seen["experts that do not divide"][1]
        assert seen["fine at last"] is None


def failures(rank):
    """A rank that rejects its input, fails inside, or leaves: what every rank raises, and that the next call is right."""
    trial = make_trial(problem(experts=15), ranks=3, seed=77)
    x, ids, weights = trial.inputs[rank]
    seen = {}
    with opened(trial, dist.group.WORLD) as s:

        def after(name, call):
            seen[name] = error_of(call)
            seen[f"{name}: afterwards"] = judged(trial, rank, s.run(x, ids, weights))

        bad = ids.clone()
        bad[3, 2] = 15
        after("too many tokens", lambda: s.run(*(torch.cat((t, t)) if rank == 1 else t for t in (x, ids, weights))))
        after("bad ids", lambda: s.run(x, bad if rank == 2 else ids, weights))
        after("two ranks", lambda: s.run(x.float() if rank else x, ids, weights))
        after("reset against run", lambda: s.reset() if rank == 1 else s.run(x, ids, weights))
        after("reset", s.reset)

        whole = session_module.expert_rows
        if rank == 0:
            session_module.expert_rows = lambda *args: 1 / 0
        seen["failure inside"] = error_of(lambda: s.run(x, ids, weights))
        session_module.expert_rows = whole
        seen["failure inside: afterwards"] = judged(trial, rank, s.run(x, ids, weights))

    left = error_of(lambda: leaves(trial, rank))
    return seen | {"left": left}


def leaves(trial, rank):
    """Rank 1 leaves its block through an exception while the others go on."""
    with opened(trial, dist.group.WORLD) as s:
        s.run(*trial.inputs[rank])
        if rank == 1:
            raise ZeroDivisionError("rank one is lost")
        with pytest.raises(PeerAborted, match="World rank 1 left the session while this rank is running the layer") as caught:
            s.run(*trial.inputs[rank])
        assert caught.value.rank == 1
        with pytest.raises(SessionClosed, match="ended when a peer left it"):
            s.run(*trial.inputs[rank])


def test_a_rank_that_cannot_go_on_tells_the_others():
    results = launch(failures, 3)
    culprits = {
        "too many tokens": {1: "InvalidInput"},
        "bad ids": {2: "InvalidInput"},
        "two ranks": {1: "InvalidInput", 2: "InvalidInput"},
        "reset against run": {},
        "failure inside": {0: "ZeroDivisionError"},
    }
    for case, own in culprits.items():
        for rank, seen in enumerate(results):
            kind, _, by = seen[case]
            if rank in own:
                assert (kind, by) == (own[rank], None), (case, rank, seen[case])
            else:
                first = min(own, default=0 if rank == 1 else 1)
                assert (kind, by) == ("PeerAborted", first), (case, rank, seen[case])
    for rank, seen in enumerate(results):
        assert seen["reset"] is None
        assert {case: what for case, what in seen.items() if case.endswith("afterwards") and what} == {}
        assert (seen["left"] or ("",))[0] == ("ZeroDivisionError" if rank == 1 else "")
    assert "rejected its input while this rank is running the layer" in results[0]["too many tokens"][1]


def lost_peer(rank):
    """Rank 1 vanishes without a word."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=30))
    trial = make_trial(problem(), ranks=2, seed=78)
    s = BACKEND.open_session(plan := BACKEND.plan(trial.problem, ranks=2), BACKEND.prepare_weights(plan, trial.local_weights(rank)), group)
    if rank == 1:
        dist.destroy_process_group()
        return None
    first = error_of(lambda: s.run(*trial.inputs[rank]))
    second = error_of(lambda: s.run(*trial.inputs[rank]))
    s.close()
    broken = replace(trial.local_weights(rank), w13=None)
    third = error_of(lambda: MoELayer(trial.problem, broken, backend="reference", group=group))
    return first, second, third


def test_a_peer_that_vanishes_is_an_error_and_no_hang():
    first, second, third = launch(lost_peer, 2, timeout=120.0)[0]
    assert first[0] == "PeerAborted"
    assert "A collective among the ranks failed" in first[1]
    assert first[2] == -1
    assert second[0] == "SessionClosed"
    assert third[0] == "InvalidInput"


def mismatch_is_the_documented_class(rank):
    trial = make_trial(problem(), ranks=2, seed=79)
    odd = replace(trial.problem, activation=SwiGLU(limit=7.0)) if rank else trial.problem
    plan = BACKEND.plan(odd, ranks=2)
    with pytest.raises(
        RankMismatch, match=r"problem\.activation is .* on ranks \[0\], .* on ranks \[1\]; allowed: equal on all 2 ranks\. Fix: "
    ):
        BACKEND.open_session(plan, BACKEND.prepare_weights(plan, trial.local_weights(rank)), dist.group.WORLD)


def test_engines_get_rank_mismatch_from_open_session():
    launch(mismatch_is_the_documented_class, 2)
