"""Where scale bytes lie: the plain layout (rows, K blocks) and the blocked one that block-scaled tensor cores read.

Blocked: atoms of 128 rows x 4 K blocks, 512 bytes each. Inside an atom the byte of row ``r`` and K block ``c`` is at
``(r % 32) * 16 + (r // 32) * 4 + c``. The atoms of 128 rows follow each other along K, then come the next 128 rows.
Rows are padded to 128 and K blocks to 4, with zero bytes.
"""

from __future__ import annotations

import torch

from megamoe.errors import InvalidInput

ATOM_ROWS, ATOM_BLOCKS = 128, 4


def blocked_bytes(rows: int, blocks: int) -> int:
    """Size of the blocked layout of (rows, blocks) one-byte scales."""
    return -(-rows // ATOM_ROWS) * ATOM_ROWS * -(-blocks // ATOM_BLOCKS) * ATOM_BLOCKS


def to_blocked(scale: torch.Tensor) -> torch.Tensor:
    """(..., rows, blocks) of a one-byte type -> (..., blocked_bytes(rows, blocks)) of the same type.

    Raises:
        InvalidInput: the scales are not one byte each.
    """
    if scale.element_size() != 1:
        raise InvalidInput(
            f"scales are {scale.dtype}; allowed in the blocked layout: one-byte types.", hint="fp32 scales stay in the plain layout"
        )
    *lead, rows, blocks = scale.shape
    pad = (0, -blocks % ATOM_BLOCKS, 0, -rows % ATOM_ROWS)
    plain = torch.nn.functional.pad(scale.view(torch.uint8), pad)
    atoms = plain.reshape(*lead, plain.shape[-2] // ATOM_ROWS, 4, 32, plain.shape[-1] // ATOM_BLOCKS, ATOM_BLOCKS)
    return atoms.movedim((-5, -2, -3, -4, -1), (-5, -4, -3, -2, -1)).reshape(*lead, -1).view(scale.dtype)


def from_blocked(scale: torch.Tensor, rows: int, blocks: int) -> torch.Tensor:
    """Inverse of :func:`to_blocked`: (..., blocked_bytes(rows, blocks)) -> (..., rows, blocks).

    Raises:
        InvalidInput: the last dimension is not the blocked size of (rows, blocks).
    """
    *lead, size = scale.shape
    if size != blocked_bytes(rows, blocks):
        raise InvalidInput(
            f"{size} blocked scale bytes; ({rows}, {blocks}) scales take {blocked_bytes(rows, blocks)}.",
            hint="pass the unpadded rows and K blocks",
        )
    tall, wide = -(-rows // ATOM_ROWS), -(-blocks // ATOM_BLOCKS)
    atoms = scale.view(torch.uint8).reshape(*lead, tall, wide, 32, 4, ATOM_BLOCKS)
    plain = atoms.movedim((-5, -4, -3, -2, -1), (-5, -2, -3, -4, -1)).reshape(*lead, tall * ATOM_ROWS, wide * ATOM_BLOCKS)
    return plain[..., :rows, :blocks].contiguous().view(scale.dtype)
