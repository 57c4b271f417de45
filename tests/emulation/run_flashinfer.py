"""Runs one of FlashInfer's MoE megakernels emulated and compares each output with a reference written here from the layer's definition.

    python run_flashinfer.py WHERE[:SEED] FOLDER VARIANT [small | normal | large]

WHERE is "gpu" (a Hopper GPU), "machine" (tests/machine runs the rewritten kernels on the CPU), "races" (the same, and data races are
faults) or "assemble" (rewrite and assemble, launch nothing). SEED, when given, is that of delayed mode. FOLDER is
flashinfer/moe_ep/kernel_src of the flashinfer-python wheel. Without a size the CPU runs the small layer, a GPU the normal one. Prints one
JSON document on the last line.
"""

from __future__ import annotations

import ctypes
import json
import re
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

from tests.emulation import on_machine  # noqa: E402
from tests.emulation.model_flashinfer import Layer, blocked, compare  # noqa: E402

from megamoe import emulation  # noqa: E402
from megamoe.emulation.assemble import build  # noqa: E402

LIMIT_MS = 20_000
SIZES = {
    "small": ({"tokens": 24, "experts": 4, "hidden": 512, "inter": 256}, 4),
    "normal": ({}, 132),
    "large": ({"tokens": 128, "experts": 16, "top_k": 4, "hidden": 2048, "inter": 512}, 132),
}
"""The layer, and how many CTAs it is launched with: what the CPU does, what a GPU does, and what is timed there."""
COUNTERS = frozenset(
    (
        *("l1_arrival_count", "expert_send_count", "expert_recv_count", "expert_recv_count_sum", "grid_sync_counter"),
        *("nvlink_barrier_counter", "nvlink_barrier_signal", "fc1_done_counter", "fc2_done_counter"),
        *("token_back_schedule_counter", "load_balance_counter"),
    )
)
"""Regions of the workspaces that are zero before a launch. In the others is what earlier launches left."""
POISON = 0xFF
"""A byte of NaN in E4M3, UE8M0 and bfloat16."""


@dataclass(frozen=True)
class Variant:
    """A configuration of one of the kernels.

    Attributes:
        arch: emulated architecture.
        tree: its folder below kernel_src.
        tile: M (weights' rows), N (tokens), K of one product.
        pair: two CTAs a product.
        reduce: the kernel adds the experts of a token up itself.
        more: constructor arguments.
    """

    arch: str
    tile: tuple[int, int, int]
    pair: bool = False
    reduce: bool = False
    more: dict[str, object] = field(default_factory=dict)


VARIANTS = {
    "sm120": Variant("sm120", (64, 64, 128)),
    "sm120 standalone return": Variant("sm120", (64, 64, 128), more={"token_back_mode": "standalone_warps"}),
    "sm120 128 tokens": Variant("sm120", (64, 128, 128)),
    "sm120 reduce": Variant("sm120", (64, 64, 128), reduce=True),
    "sm100 one CTA": Variant("sm100", (128, 128, 256)),
    "sm100 reduce": Variant("sm100", (128, 128, 256), reduce=True),
    "sm100 pair": Variant("sm100", (256, 128, 256), pair=True),
}
TREES = {"sm120": "sm120/swapab_cutedsl_megakernel", "sm100": "sm100/cutedsl_megamoe"}


class AsIfOnDevice:
    """A tensor of host memory that says it is device memory, so that kernels are compiled for that address space without a GPU."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack_device__(self):
        return (2, 0)  # kDLCUDA

    def __dlpack__(self, stream=None):
        capsule = self.tensor.__dlpack__()
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        ctypes.c_int32.from_address(pointer(capsule, b"dltensor") + 8).value = 2
        return capsule


def kernel_of(variant, layer, ctas):
    """The kernel object, and how many clusters it is told to launch at most."""
    import cutlass
    from common.megamoe_constants import SfPaddingBlock

    clusters = ctas // (2 if variant.pair else 1)
    shared = {
        "mma_tiler_mnk": variant.tile, "cluster_shape_mnk": (2, 1, 1) if variant.pair else (1, 1, 1), "use_2cta_instrs": variant.pair,
        "group_hint": clusters, "sf_padding_block": SfPaddingBlock, "static_expert_shape": (layer.experts, 2 * layer.inter, layer.hidden),
        "world_size": 1, "num_topk": layer.top_k, "max_tokens_per_rank": layer.tokens, "hidden": layer.hidden,
        "fc2_output_dtype": cutlass.BFloat16, "in_kernel_fc2_reduce": variant.reduce, **variant.more,
    }  # fmt: skip
    if variant.arch == "sm120":
        from moe_sm120_mxfp8_swapab.megamoe_kernel import Sm120MegaMoEMxfp8SwapABKernel
        from moe_sm120_mxfp8_swapab.sm120_mma import CTA_TOKEN_TILE

        kernel = Sm120MegaMoEMxfp8SwapABKernel(
            **shared, token_padding_block=CTA_TOKEN_TILE, sf_vec_size=32, local_rank=0, apply_topk_in_fc1=False
        )
        return kernel, clusters
    from moe_nvfp4_swapab.epilogue_refactor import SwapABSwigluFp4Epilogue
    from moe_nvfp4_swapab.megamoe_kernel import Sm100MegaMoEKernel

    padding = SwapABSwigluFp4Epilogue._EpilogueTokenTileSize
    return Sm100MegaMoEKernel(**shared, token_padding_block=padding, apply_topk_in_fc1=True, flag_batch=4), clusters


def arguments_of(variant, layer, kernel, device):
    """Arguments by name, the tensor with the outputs, and what must be kept alive."""
    import cutlass
    import cutlass.cute as cute
    import cutlass.torch as interop
    import torch
    from cuda.bindings import driver
    from cutlass.cute.typing import AddressSpace
    from src.sym_buffer import SymBufferHost

    data = torch.float4_e2m1fn_x2 if layer.four_bit else torch.float8_e4m3fn
    scale = torch.float8_e4m3fn if layer.four_bit else torch.float8_e8m0fnu

    def zeros(*shape, dtype):
        """At a multiple of 512 bytes, as device memory is."""
        size = int(np.prod(shape)) * dtype.itemsize
        memory = torch.zeros(size + 512, dtype=torch.uint8, device=device)
        first = -memory.data_ptr() % 512
        return memory[first : first + size].view(dtype).reshape(shape)

    def on_device(array, dtype=None):
        given = torch.from_numpy(np.ascontiguousarray(array))
        tensor = zeros(*given.shape, dtype=given.dtype)
        tensor.copy_(given)
        return tensor if dtype is None else tensor.view(dtype)

    local, shared = (zeros(size, dtype=torch.uint8) for size in kernel.get_workspace_sizes())
    reduced = layer.four_bit or variant.reduce
    slots = () if layer.four_bit else (1 if reduced else layer.top_k,)
    out = zeros(layer.tokens, *slots, layer.hidden, dtype=torch.bfloat16)
    poison(variant, kernel, out, {"local": local, "shared": shared})
    ones = np.ones(layer.experts, np.float32)
    tensors = {
        "activation": on_device(layer.x.bytes, data),
        "activation_sf": on_device(layer.x.scales, scale),
        "topk_idx": on_device(layer.experts_of),
        "topk_weights": on_device(layer.weights_of),
        "fc1_weight": on_device(layer.fc1.bytes, data).permute(0, 2, 1),
        "fc1_weight_sf": on_device(np.stack([blocked(s) for s in layer.fc1.scales]), scale),
        "fc2_weight": on_device(layer.fc2.bytes, data).permute(0, 2, 1),
        "fc2_weight_sf": on_device(np.stack([blocked(s) for s in layer.fc2.scales]), scale),
        "fc1_alpha": on_device(ones), "fc2_alpha": on_device(ones), "fc1_norm_const": on_device(ones),
        "output_activation" if layer.four_bit else "combine_output": out,
        "local_workspace": local, "shared_workspace": shared,
    }  # fmt: skip
    arguments = {}
    for name, tensor in tensors.items():
        if name.endswith("workspace") and layer.four_bit:
            arguments[name] = cute.runtime.make_ptr(cutlass.Uint8, tensor.data_ptr(), AddressSpace.gmem, assumed_align=16)
            continue
        view = interop.from_dlpack(
            tensor if device == "cuda" else AsIfOnDevice(tensor), assumed_align=4 if name[-5:] in ("alpha", "const") else 16
        )
        if name != "local_workspace":
            view = view.mark_layout_dynamic(leading_dim=interop.get_leading_dim(tensor))
        arguments[name] = view
    stream = torch.cuda.current_stream().cuda_stream if device == "cuda" else 0
    arguments["stream"] = driver.CUstream(stream)
    arguments["peer_rank_ptr_mapper_host"] = SymBufferHost(base_addr=shared.data_ptr(), offsets=(0,), rank_idx=0, num_max_ranks=1)
    return arguments, out, tensors


def poison(variant, kernel, out, workspaces):
    """Fills with NaN what the kernel is to write before it is read: all of the workspaces but the counters, and the output unless the
    kernel adds to it. `workspaces`: by "local" and "shared"."""
    import torch

    written = [] if variant.reduce else [out]
    for side, memory in workspaces.items():
        sizes, firsts = getattr(kernel, f"_{side}_region_by_name"), getattr(kernel, f"_{side}_offsets")
        written += [memory[first : first + sizes[name].nbytes] for name, first in firsts.items() if name not in COUNTERS]
    for tensor in written:
        tensor.view(torch.uint8).fill_(POISON)


def resources(module):
    """Of every kernel of a rewritten module: threads of a CTA, registers with what it calls, and the bytes that it spills itself."""
    with tempfile.TemporaryDirectory() as scratch:
        _, told = build(module, Path(scratch))
    threads = dict(re.findall(r"\.entry (\w+)\([^{]*?\.(?:reqntid|maxntid) (\d+)", module.text))
    spilled = dict(re.findall(r"Compiling entry function '(\w+)'.*?(\d+) bytes spill stores", told, re.DOTALL))
    registers = dict(re.findall(r"nvlink info\s*: Function properties for '(\w+)':.*?used (\d+) registers", told, re.DOTALL))
    assert set(registers) == set(spilled) == set(threads), told
    return [{"threads": int(threads[k]), "spilled": int(spilled[k]), "registers": int(registers[k])} for k in threads]


def main():
    where, folder, name, *size = sys.argv[1:]
    where, _, seed = where.partition(":")
    on_machine.RACES = where == "races"
    on_cpu = where in ("machine", "races")
    variant = VARIANTS[name]
    shape, ctas = SIZES[size[0] if size else "small" if on_cpu else "normal"]
    layer = Layer.random(four_bit=variant.arch == "sm100", **shape)
    with emulation.emulate(
        variant.arch, emulation.Options(seed=int(seed) if seed else None, loads_wait=False, limit_ms=LIMIT_MS)
    ) as emulated:
        sys.path.insert(0, str(Path(folder) / TREES[variant.arch] / "src"))
        import cutlass.cute as cute

        kernel, clusters = kernel_of(variant, layer, ctas)
        arguments, out, kept = arguments_of(variant, layer, kernel, "cuda" if where == "gpu" else "cpu")
        machine = on_machine.Captured(lambda: emulated.modules[-1], lambda: kept.values())
        if on_cpu:
            machine.hook()
        rewriting, rewrite = [], emulated.compiled

        def timed(*of_module):
            begin = time.perf_counter()
            rewrite(*of_module)
            rewriting.append(time.perf_counter() - begin)

        emulated.compiled = timed
        start = time.perf_counter()
        compiled = cute.compile(kernel, max_active_clusters=clusters, **arguments)
        found = {"compiled": round(time.perf_counter() - start, 1), "forms": [module.forms for module in emulated.modules]}
        found["rewritten"] = round(sum(rewriting), 3)
        found["notes"] = [note for module in emulated.modules for note in module.notes]
        found["kernels"] = [usage for module in emulated.modules for usage in resources(module)]
        if where != "assemble":
            start = time.perf_counter()
            try:
                compiled(**arguments)
            except Exception:
                if machine.error is None:
                    raise
            if machine.error is not None:
                raise machine.error
            if where == "gpu":
                emulated.check()
            found["launched"] = round(time.perf_counter() - start, 3)
            found |= compare(layer, out.float().cpu().numpy(), reduced=layer.four_bit or variant.reduce)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
