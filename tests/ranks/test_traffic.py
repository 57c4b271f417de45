"""Bytes and rows that routings move between ranks, counted by hand."""

import torch

from megamoe import MoEProblem, Placement
from megamoe.testing.traffic import Traffic, imbalance, traffic

IDS = torch.tensor([[0, 1, 2], [2, 2, 3], [-1, -1, 3], [0, 0, 1]])
SPREAD = Placement(((0, 1), (2,), (3,)))


def problem_of(format, placement=SPREAD):
    return MoEProblem(4, 3, 256, 128, 8, format, placement=placement)


def test_a_token_crosses_once_a_rank_and_every_result_comes_back():
    # From rank 0: token 0 to rank 1, token 1 to ranks 1 and 2, token 2 to rank 2; routes to others: 1 + 3 + 1.
    assert traffic(problem_of("fp8_block128"), IDS, 3, 0) == Traffic(4 * (256 + 4 * 2) + 5 * 512, (5, 3, 2))
    assert traffic(problem_of("bf16"), IDS, 3, 1).wire_bytes == (2 + 2) * 512 + (5 + 2) * 512


def test_grouped_results_come_back_once_a_rank():
    assert traffic(problem_of("fp8_block128"), IDS, 3, 0, {"combine": "grouped"}).wire_bytes == 4 * (256 + 4 * 2) + 4 * 512
    assert traffic(problem_of("bf16"), IDS, 3, 0, {"combine": "grouped", "wire": "mxfp8"}).wire_bytes == 4 * 512 + 4 * (256 + 8)


def test_tokens_choose_among_copies_of_an_expert_by_their_number():
    twice = Placement(((0, 2), (1, 2), (3, 2)))
    ids = torch.tensor([[2], [2], [2], [2], [-1]])
    one = MoEProblem(4, 1, 256, 128, 8, "bf16", placement=twice)
    assert traffic(one, ids, 3, 0).sent == (2, 1, 1)


def test_imbalance_is_the_fullest_over_the_mean():
    assert imbalance([Traffic(0, (4, 0, 2)), Traffic(0, (3, 2, 1)), Traffic(0, (0, 0, 0))]) == 7 / 4
    assert imbalance([Traffic(0, (0, 0))] * 2) == 1.0
