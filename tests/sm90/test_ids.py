"""How a session narrows int64 ids to what the kernels read; needs no GPU."""

from types import SimpleNamespace

import torch

from megamoe_sm90.session import Sm90Session


def test_ids_beyond_32_bits_stay_out_of_range():
    session = Sm90Session.__new__(Sm90Session)
    session._problem = SimpleNamespace(experts=8)
    session._ids64 = torch.empty(5, 3, dtype=torch.int64)
    session._ids32 = torch.empty(5, 3, dtype=torch.int32)
    ids = torch.tensor([[0, 7, -1], [8, 2**32, 2**32 + 1], [-2, -(2**32), 2**31]])
    narrow = session._narrow(ids)
    assert narrow.dtype == torch.int32
    assert narrow[0].tolist() == [0, 7, -1]
    assert ((narrow[1:] < -1) | (narrow[1:] >= 8)).all()
