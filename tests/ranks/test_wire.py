"""What the device code and the host have to agree on: regions, counters and the placement table."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megamoe.device import regions, wire
from megamoe.ep.physical import PhysicalExperts
from megamoe.problem import Placement
from megamoe.reference.routing import RouteTable

MIB = 1 << 20


def spans(layout):
    return sorted((at, at + size) for at, size in layout.offsets.values() if size)


@given(
    st.integers(1, 72),
    st.integers(1, 300),
    st.integers(1, 8),
    st.integers(1, 9),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_regions_of_a_heap_are_apart_and_hold_what_kernels_write(ranks, tokens, top_k, experts, block, early, grouped, mxfp8):
    hidden = 256
    layout = wire.symmetric_layout(
        ranks=ranks,
        tokens=tokens,
        top_k=top_k,
        experts=experts,
        hidden=hidden,
        element=1,
        block_scales=block,
        early=early,
        grouped=grouped,
        mxfp8=mxfp8,
    )
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans(layout)))
    assert spans(layout)[-1][1] <= layout.nbytes
    assert layout.offsets["signal"][0] == wire.TOLD, "waits look for aborts at the heap's base"
    size = {name: nbytes for name, (_, nbytes) in layout.offsets.items()}
    # The last words that a launch of either parity writes: source ranks - 1, and where its list starts behind its last expert.
    assert size["counts"] == 8 * ((1 * ranks + ranks - 1) * (experts + 1) + experts + 1)
    assert size["flags"] == 8 * tokens * top_k
    assert size["inbox"] == 2 * tokens * top_k * hidden
    assert size["inbox_scale"] == (tokens * top_k * hidden // 32 if mxfp8 else 0)
    assert size["groups"] == (4 * tokens * top_k if grouped else 0)
    assert size["x"] == tokens * hidden
    assert size["xs"] == (tokens * hidden // 128 * 4 if block else 0)
    assert size["weights"] == (4 * tokens * top_k if early or grouped else 0)


@pytest.mark.parametrize(("grouped", "mxfp8"), [(False, False), (True, False), (True, True)])
def test_eight_ranks_of_a_large_layer_stay_below_700_mib(grouped, mxfp8):
    layout = wire.symmetric_layout(
        ranks=8, tokens=8192, top_k=6, experts=32, hidden=4096, element=1, block_scales=True, early=False, grouped=grouped, mxfp8=mxfp8
    )
    assert 384 * MIB < layout.nbytes < 700 * MIB


@given(st.integers(1, 5000), st.integers(1, 600), st.integers(1, 64), st.integers(1, 100))
def test_counters_of_a_control_region_are_apart(blocks, experts, ranks, tokens):
    bank = wire.bank_bytes(blocks)
    fc1, fc2, ready = regions.FC1_DONE, wire.fc2_done_offset(bank), regions.ready_offset(bank)
    assert fc1 + 4 * blocks <= fc2
    assert fc2 + 4 * blocks <= ready
    assert ready + 4 * blocks <= bank
    lists = regions.BANKS + 2 * bank
    carriers = wire.carriers_offset(bank, experts)
    assert lists + 4 * experts <= carriers
    assert carriers % 8 == 0
    assert carriers + 8 * ranks * tokens == wire.control_bytes(blocks, experts, ranks, tokens, grouped=False)
    groups = wire.groups_offset(bank, experts, ranks, tokens)
    assert groups == carriers + 8 * ranks * tokens
    assert groups + 4 * ranks * tokens == wire.control_bytes(blocks, experts, ranks, tokens, grouped=True)


def test_words_of_a_control_region_do_not_meet_the_ones_of_a_single_rank():
    words = [
        range(at, at + size)
        for at, size in (
            (regions.EPOCH, 4),
            (regions.EXITS, 4),
            (regions.ABORT, 4),
            (regions.STICKY, 4),
            (wire.EXCHANGES, 4),
            (wire.RANK, 4),
            (regions.REPORT, 8),
            (regions.RECORD, 64),
        )
    ]
    assert len({at for word in words for at in word}) == sum(map(len, words))
    assert not regions.SITE_NAMES.keys() & wire.SITE_NAMES.keys()


PLACEMENTS = {
    "even": (Placement.even(8, 4), 8),
    "uneven": (Placement.even(9, 4), 9),
    "a rank without experts": (Placement(((0, 1, 2), (), (3,))), 4),
    "redundant": (Placement(((0, 1, 2, 3), (4, 5, 0, 3), (6, 7, 3))), 8),
    "permuted": (Placement(((3, 1), (0, 2))), 4),
}


def test_the_table_sends_every_route_where_the_reference_sends_it():
    generator = torch.Generator().manual_seed(3)
    for name, (placement, experts) in PLACEMENTS.items():
        physical = PhysicalExperts.of(placement, experts)
        ids = torch.randint(-1, experts, (50, 3), generator=generator)
        routes = RouteTable(placement, experts, torch.device("cpu")).routes(ids)
        ranks = torch.repeat_interleave(torch.arange(placement.ranks), torch.tensor(routes.sent))
        for token, slot, rank, local in zip(*(t.tolist() for t in (routes.token, routes.slot, ranks, routes.local)), strict=True):
            expert = int(ids[token, slot])
            count, *copies = physical.rows[expert]
            found = copies[token % count] if physical.copies else expert
            assert divmod(found, physical.width) == (rank, local), (name, token, slot)


def test_a_table_is_needed_only_where_experts_are_not_in_order():
    needed = {name: PhysicalExperts.of(*case).copies for name, case in PLACEMENTS.items()}
    assert needed == {"even": 0, "uneven": 1, "a rank without experts": 1, "redundant": 3, "permuted": 1}
