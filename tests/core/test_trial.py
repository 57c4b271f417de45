"""Random trials: the same on every rank, of the right shapes, and judged rank by rank."""

import pytest
import torch

from megamoe import InvalidInput, MoEProblem, Placement, UnsupportedProblem
from megamoe.testing import oracle
from megamoe.testing.rehearsal import Rehearsal, rehearse
from megamoe.testing.trial import make_trial

PROBLEM = MoEProblem(experts=5, top_k=2, hidden=128, intermediate=64, max_tokens=7, format="bf16", placement=Placement(((3, 0), (4, 1, 2))))


def test_every_rank_makes_the_same_trial_and_another_seed_another():
    first, again, other = (make_trial(PROBLEM, ranks=2, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.weights.w13, again.weights.w13)
    assert all(torch.equal(a, b) for one, two in zip(first.inputs, again.inputs, strict=True) for a, b in zip(one, two, strict=True))
    assert not torch.equal(first.weights.w13, other.weights.w13)
    assert not torch.equal(first.inputs[0].x, first.inputs[1].x)


def test_local_weights_follow_the_placement():
    trial = make_trial(PROBLEM, ranks=2)
    for rank, experts in enumerate(PROBLEM.placement.local):
        local = trial.local_weights(rank)
        local.validate(PROBLEM, len(experts))
        for slot, expert in enumerate(experts):
            assert torch.equal(local.w13[slot], trial.weights.w13[expert])
            assert torch.equal(local.w2[slot], trial.weights.w2[expert])


@pytest.mark.parametrize("format", ["fp8_tensor", "fp8_tensor_e5m2"])
def test_static_scales_cover_the_data(format):
    trial = make_trial(MoEProblem(experts=4, top_k=2, hidden=256, intermediate=128, max_tokens=64, format=format))
    largest = {"fp8_tensor": 448, "fp8_tensor_e5m2": 57344}[format] * trial.weights.x_scale
    assert largest / 4 < trial.inputs[0].x.abs().max() < largest


def test_a_wrong_row_is_found_where_it_is_judged_and_only_there():
    trial = make_trial(PROBLEM, ranks=2, tokens=(7, 3))
    right = [torch.from_numpy(oracle.compute(PROBLEM, trial.weights, *inputs).value).float() for inputs in trial.inputs]
    assert all(trial.judge(rank, right[rank]).ok for rank in range(2))
    assert not trial.judge(1, right[0][:3]).ok
    wrong = right[0].clone()
    wrong[3] += 1.0
    assert not trial.judge(0, wrong).ok
    assert not trial.judge(0, wrong, most=3).ok  # rows 0, 3 and 6
    assert trial.judge(0, wrong, most=2).ok  # rows 0 and 6
    assert trial.judge(0, right[0], most=100).ok


@pytest.mark.parametrize("tokens", [8, (1, 2, 3), (7, -1)])
def test_tokens_that_do_not_fit_are_refused(tokens):
    with pytest.raises(InvalidInput, match="max_tokens=7"):
        make_trial(PROBLEM, ranks=2, tokens=tokens)


def test_more_ranks_than_the_placement_has_are_refused():
    with pytest.raises(UnsupportedProblem, match="placement is for 2 ranks"):
        make_trial(PROBLEM, ranks=3)


def test_rehearsal_reports_progress_and_every_rank():
    steps = []
    single = MoEProblem(experts=4, top_k=2, hidden=64, intermediate=64, max_tokens=5, format="bf16")
    done = rehearse("reference", single, tokens=4, repeats=2, step=lambda: steps.append(1))
    from megamoe.testing.rehearsal import STEPS

    assert len(steps) == STEPS + 2
    assert done.ok
    assert (done.backend, done.device, done.tokens) == ("reference", "CPU", (4,))
    several = rehearse("reference", PROBLEM, ranks=2, tokens=(7, 0))
    assert several.ok
    assert several.tokens == (7, 0)


def test_rehearsal_tells_of_the_worst_rank():
    fine = oracle.Judgement(True, 1e-3, 0.9, "fine")
    bad = oracle.Judgement(False, 5e-2, 0.8, "bad")
    done = Rehearsal("gpu", "GPU", (3, 4), 0.5, (fine, bad))
    assert not done.ok
    assert done.rel_l2 == 5e-2
    assert done.text == "rank 1: bad"
    assert done.tokens_per_second == 14


def test_an_error_on_a_rank_comes_back_with_its_message():
    from megamoe import MegaMoEError

    with pytest.raises(MegaMoEError, match=r"2 of 2 ranks failed(.|\n)*No backend named 'sm35'"):
        rehearse("sm35", PROBLEM, ranks=2)
