"""The problem's types: what each field may be, and what the errors say."""

import math
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megamoe import InvalidInput, MoEProblem, Placement, SwiGLU, UnsupportedProblem
from megamoe.formats import FORMATS

GOOD = {"experts": 8, "top_k": 2, "hidden": 256, "intermediate": 128, "max_tokens": 64, "format": "bf16"}


def problem(**changes):
    return MoEProblem(**GOOD | changes)


def test_defaults_are_a_plain_layer():
    made = problem()
    assert made.activation == SwiGLU(limit=None, alpha=1.0, up_bias=0.0)
    assert (made.routing_weight, made.placement, made.checked) == ("late", None, False)


def test_equal_problems_hash_alike_and_survive_pickling():
    one, two = problem(activation=SwiGLU(limit=7)), problem(activation=SwiGLU(limit=7.0), experts=np.int64(8))
    assert one == two
    assert hash(one) == hash(two)
    assert type(two.experts) is int
    assert pickle.loads(pickle.dumps(one)) == one


@pytest.mark.parametrize("name", ["experts", "top_k", "hidden", "intermediate", "max_tokens"])
@pytest.mark.parametrize("value", [0, -1, 2.0, "8", None, True, math.nan])
def test_sizes_are_whole_numbers_of_at_least_one(name, value):
    allowed = "from 1 to 65536" if name == "experts" else "of at least 1"
    with pytest.raises(InvalidInput, match=rf"{name}={value!r}; allowed: a whole number {allowed}.* Fix: "):
        problem(**{name: value})


def test_so_many_experts_that_listing_them_would_fill_the_memory():
    assert problem(experts=65536).experts == 65536
    for experts in (65537, 2**33, 10**30):
        with pytest.raises(InvalidInput, match=rf"experts={experts}; allowed: a whole number from 1 to 65536"):
            problem(experts=experts)


@pytest.mark.parametrize("top_k", [1, 6, 8, 10, 16, 32])
def test_top_k_of_models_is_accepted(top_k):
    assert problem(top_k=top_k, experts=64).top_k == top_k


@pytest.mark.parametrize(("top_k", "experts"), [(33, 64), (9, 8), (2, 1)])
def test_top_k_beyond_its_limits(top_k, experts):
    with pytest.raises(InvalidInput, match=rf"top_k={top_k} with experts={experts}; allowed: 1 to min\(32, experts\)"):
        problem(top_k=top_k, experts=experts)


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_accepted(name):
    assert problem(format=name).format == name


@pytest.mark.parametrize("name", ["fp8", "BF16", "", None, ["bf16"]])
def test_unknown_format_names_the_known_ones(name):
    with pytest.raises(InvalidInput, match="allowed: bf16, fp8_tensor, fp8_tensor_e5m2, fp8_block128, mxfp8, mxfp8_e5m2, nvfp4"):
        problem(format=name)


@pytest.mark.parametrize(("name", "value"), [("routing_weight", "Late"), ("routing_weight", None), ("checked", 1), ("checked", None)])
def test_choices(name, value):
    with pytest.raises(InvalidInput, match=rf"{name}={value!r}; allowed: "):
        problem(**{name: value})


@pytest.mark.parametrize(
    ("given", "kept"), [(None, None), (7, 7.0), (np.float32(0.5), 0.5), (math.inf, None), (1e39, None), (10**400, None), (1e-30, 1e-30)]
)
def test_clamp_bounds(given, kept):
    assert SwiGLU(limit=given).limit == kept


@pytest.mark.parametrize("limit", [0, 0.0, -7, -(10**400), -math.inf, math.nan, "7", True])
def test_clamp_bounds_that_are_none(limit):
    with pytest.raises(InvalidInput, match="limit"):
        SwiGLU(limit=limit)


@pytest.mark.parametrize("name", ["alpha", "up_bias"])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 1e39, -1e300, 10**400, -(10**400), None, "1", False])
def test_alpha_and_bias_are_finite(name, value):
    with pytest.raises(InvalidInput, match=name):
        SwiGLU(**{name: value})


@pytest.mark.parametrize("activation", ["silu", "SiTU", None, SwiGLU])
def test_other_activations_are_rejected_with_the_reason(activation):
    with pytest.raises(UnsupportedProblem, match=r"implemented by no backend; SwiGLU .* \(fix: pass megamoe.SwiGLU") as caught:
        problem(activation=activation)
    assert len(caught.value.reasons) == 1


# ---------------------------------------------------------------------------------------------------- placement


@given(st.integers(1, 300), st.integers(1, 40))
def test_even_placement_holds_every_expert_once_in_order(experts, ranks):
    placement = Placement.even(experts, ranks)
    assert placement.ranks == ranks
    assert [e for rank in placement.local for e in rank] == list(range(experts))
    sizes = [len(rank) for rank in placement.local]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize(("experts", "ranks"), [(8, 0), (8, -1), (0, 2), (8, 1.5), (8, 2**33), (2**33, 8)])
def test_even_placement_needs_whole_numbers(experts, ranks):
    with pytest.raises(InvalidInput, match="allowed: a whole number from 1 to 65536"):
        Placement.even(experts, ranks)


def test_physical_table_of_an_expert_balancer():
    placement = Placement.from_physical([0, 1, 2, 0, 3, 1], ranks=3)
    assert placement.local == ((0, 1), (2, 0), (3, 1))
    assert placement.replicas(4) == (((0, 0), (1, 1)), ((0, 1), (2, 1)), ((1, 0),), ((2, 0),))


def test_physical_table_that_does_not_divide():
    with pytest.raises(InvalidInput, match="5 physical experts do not divide by 2 ranks"):
        Placement.from_physical([0, 1, 2, 3, 0], ranks=2)
    with pytest.raises(InvalidInput, match="ranks=0"):
        Placement.from_physical([0, 1], ranks=0)
    with pytest.raises(InvalidInput, match="physical_to_logical is 5; allowed: a sequence"):
        Placement.from_physical(5, ranks=1)


@pytest.mark.parametrize("local", [5, ((0.5,),), (("0", "1"),), ((0, None),), (0, 1), None])
def test_placement_of_something_else_than_ids(local):
    with pytest.raises(InvalidInput, match="allowed: one sequence of expert ids"):
        Placement(local)


def test_placement_without_ranks_or_with_an_expert_twice_on_one():
    with pytest.raises(InvalidInput, match="placement has no ranks"):
        Placement(())
    with pytest.raises(InvalidInput, match="puts expert 3 twice on rank 1"):
        Placement(((0, 1, 2), (3, 0, 3)))


def test_placement_takes_arrays_and_lists():
    assert Placement([np.array([1, 0]), [2]]) == Placement(((1, 0), (2,)))


@pytest.mark.parametrize(("local", "said"), [(((0, 1), (2,)), r"misses experts \[3\]"), (((0, 1, 2, 3, 4),), r"names unknown ones \[4\]")])
def test_placement_has_to_hold_exactly_the_problems_experts(local, said):
    with pytest.raises(InvalidInput, match=said):
        problem(experts=4, placement=Placement(local))


def test_placement_of_another_type():
    with pytest.raises(InvalidInput, match=r"allowed: None or a megamoe\.Placement"):
        problem(placement=((0, 1, 2, 3), (4, 5, 6, 7)))


def test_experts_that_do_not_divide_name_the_placement_that_helps():
    with pytest.raises(UnsupportedProblem, match=r"8 experts do not divide by 3 ranks .*Placement.even\(8, 3\)"):
        problem().resolved_placement(3)
    helped = problem(placement=Placement.even(8, 3))
    assert [len(rank) for rank in helped.resolved_placement(3).local] == [3, 3, 2]


def test_placement_for_another_number_of_ranks():
    with pytest.raises(UnsupportedProblem, match="placement is for 3 ranks, the group has 2"):
        problem(placement=Placement.even(8, 3)).resolved_placement(2)


@pytest.mark.parametrize("ranks", [0, -1, 2.0, "2", True, None])
def test_ranks_are_a_whole_number_of_at_least_one(ranks):
    (reason,) = problem().placement_reasons(ranks)
    assert str(reason) == f"ranks={ranks!r}; allowed: a whole number of at least 1 (fix: pass the size of the expert-parallel group)."
