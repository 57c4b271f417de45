"""One process that holds the four real kernel trees: imports every module, compiles a kernel of each, and describes what it found.

    python drop_real_process.py FOLDER      FOLDER holds the packages of TREES, each with a drop

Prints one JSON document after the line MARK. Kernels are compiled for fake tensors of a small layer, without a GPU.
"""

import importlib
import inspect
import json
import struct
import sys
import time
from pathlib import Path

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor, make_ptr
from cutlass.cute.typing import AddressSpace

from megamoe.drop.guard import drop_imports

MARK = "=== found ==="
TREES = ("real_sm90", "real_sm100", "real_sm120_swapab", "real_sm120_split")
TOKENS, EXPERTS, TOP_K, HIDDEN, INTER = 64, 8, 4, 1024, 512
FP4, FP8, E8M0, F32, BF16, U8 = (
    cutlass.Float4E2M1FN, cutlass.Float8E4M3FN, cutlass.Float8E8M0FNU, cutlass.Float32, cutlass.BFloat16, cutlass.Uint8,
)  # fmt: skip

CALLABLES = {
    "real_sm90": [
        ("moe_hopper_fp8.megamoe_kernel_fp8", "Sm90MegaMoEFp8Kernel"),
        ("moe_hopper_fp8.megamoe_kernel_fp8", "Sm90MegaMoESwapABFp8Kernel"),
    ],
    "real_sm100": [
        ("moe_nvfp4_swapab.megamoe_kernel", "Sm100MegaMoEKernel"),
        ("moe_mxfp8_glu.megamoe_kernel_mxfp8", "Sm100MegaMoEMxfp8Kernel"),
        ("moe_bf16_glu.megamoe_kernel_bf16", "Sm100MegaMoEBf16Kernel"),
    ],
    "real_sm120_swapab": [("moe_sm120_mxfp8_swapab.megamoe_kernel", "Sm120MegaMoEMxfp8SwapABKernel")],
    "real_sm120_split": [
        ("moe_sm120_mxfp4mxfp8_split.megamoe_kernel", "Sm120MegaMoEMxfp8SwapABKernel"),
        ("moe_sm120_mxfp4mxfp8_split.api", "select_compile_spec"),
        ("moe_sm120_mxfp4mxfp8_split.api", "MegaMoEProblemSpec"),
    ],
}
"""What an adapter of each tree constructs and calls."""
CONSTANTS = {tree: ("common.megamoe_constants", ("Nvfp4BlockSize", "Mxfp8BlockSize", "SfPaddingBlock")) for tree in TREES}


def load(tree, module, name):
    with drop_imports():
        return getattr(importlib.import_module(f"{tree}._drop.{module}"), name)


def import_all(folder):
    """Every module of every tree; those that could not be imported, with what they lack."""
    good, lacking = [], {}
    for tree in TREES:
        for path in sorted((folder / tree / "_drop").rglob("*.py")):
            name = ".".join(path.relative_to(folder).with_suffix("").parts).removesuffix(".__init__")
            try:
                with drop_imports():
                    importlib.import_module(name)
                good.append(name)
            except ModuleNotFoundError as error:
                lacking[name] = error.name
    return good, lacking


def tensor(dtype, *shape, align=16, k_major=False):
    order = [0, 2, 1] if k_major else range(len(shape))
    strides, step = [0] * len(shape), 1
    for axis in reversed([*order]):
        strides[axis], step = step, step * shape[axis]
    return make_fake_tensor(dtype, shape, tuple(strides), assumed_align=align)


def up(value, to):
    return -(-value // to) * to


def operands(tree, weight=FP8):
    """The arguments that the kernels of all trees share."""
    host = load(tree, "src.sym_buffer", "SymBufferHost")
    shapes = (EXPERTS, HIDDEN, 2 * INTER), (EXPERTS, INTER, HIDDEN)
    fc1, fc2 = (tensor(weight, *s, k_major=True) if weight is FP8 else tensor(weight, s[0], s[2], s[1]) for s in shapes)
    return {
        "activation": tensor(FP8, TOKENS, HIDDEN),
        "activation_sf": tensor(E8M0, TOKENS, up(HIDDEN // 32, 4)),
        "topk_idx": tensor(cutlass.Int64, TOKENS, TOP_K),
        "topk_weights": tensor(F32, TOKENS, TOP_K),
        "fc1_weight": fc1,
        "fc2_weight": fc2,
        "fc1_weight_sf": tensor(E8M0, EXPERTS, up(2 * INTER, 128) * up(HIDDEN // 32, 4)),
        "fc2_weight_sf": tensor(E8M0, EXPERTS, up(HIDDEN, 128) * up(INTER // 32, 4)),
        "peer_rank_ptr_mapper_host": host(base_addr=0, offsets=(0,), rank_idx=0, num_max_ranks=1),
        "stream": make_fake_stream(),
    }


def scalars(*names):
    return {name: tensor(F32, EXPERTS, align=4) for name in names}


def sizes(tile, **more):
    return {
        "mma_tiler_mnk": tile, "cluster_shape_mnk": (1, 1, 1), "use_2cta_instrs": False, "group_hint": 100, "sf_padding_block": 128,
        "static_expert_shape": (EXPERTS, 2 * INTER, HIDDEN), "world_size": 1, "local_rank": 0, "num_topk": TOP_K,
        "max_tokens_per_rank": TOKENS, "hidden": HIDDEN, **more,
    }  # fmt: skip


def workspaces(kernel):
    local, shared = kernel.get_workspace_sizes()
    return {"local_workspace": tensor(U8, local), "shared_workspace": tensor(U8, shared)}


def sm90():
    tree = "real_sm90"
    kernel = load(tree, *CALLABLES[tree][0])(**sizes((64, 256, 128), token_padding_block=64, fp8_scale_mode="blockwise"))
    pointer = make_ptr(U8, 4096, AddressSpace.gmem, assumed_align=16)
    arguments = {
        **operands(tree),
        "activation_sf": tensor(F32, TOKENS, HIDDEN // 128),
        "fc1_weight_sf": tensor(F32, EXPERTS, 2 * INTER // 128, HIDDEN // 128),
        "fc2_weight_sf": tensor(F32, EXPERTS, HIDDEN // 128, INTER // 128),
        "fc1_activation_dequant_scale": tensor(F32, 1, align=4),
        "fc2_activation_dequant_scale": tensor(F32, 1, align=4),
        **scalars("fc1_weight_dequant_scale", "fc2_weight_dequant_scale"),
        "fc1_c": None,
        "output_activation": tensor(BF16, TOKENS, HIDDEN),
        "local_workspace": pointer,
        "shared_workspace": pointer,
    }
    return tree, "sm_90a", kernel, arguments, 132


def sm100():
    tree = "real_sm100"
    padding = load(tree, "moe_nvfp4_swapab.epilogue", "EpilogueTokenTile")
    chosen = {"token_padding_block": padding, "cluster_shape_mnk": (2, 1, 1), "use_2cta_instrs": True}
    kernel = load(tree, *CALLABLES[tree][1])(**sizes((256, 256, 128), **chosen))
    arguments = {**operands(tree), "fc1_c": None, "output_activation": tensor(BF16, TOKENS, HIDDEN), **workspaces(kernel)}
    return tree, "sm_100a", kernel, arguments, 74


def sm120_swapab():
    tree = "real_sm120_swapab"
    padding = load(tree, "moe_sm120_mxfp8_swapab.sm120_mma", "CTA_TOKEN_TILE")
    chosen = {"token_padding_block": padding, "fc2_output_dtype": BF16, "apply_topk_in_fc1": False}
    kernel = load(tree, *CALLABLES[tree][0])(**sizes((64, 128, 128), **chosen))
    combine = {"combine_output": tensor(BF16, TOKENS, TOP_K, HIDDEN)}
    return (
        tree,
        "sm_120a",
        kernel,
        {**operands(tree), **scalars("fc1_alpha", "fc2_alpha", "fc1_norm_const"), **combine, **workspaces(kernel)},
        188,
    )


def sm120_split():
    tree, api = "real_sm120_split", "moe_sm120_mxfp4mxfp8_split.api"
    problem = load(tree, api, "MegaMoEProblemSpec")(
        tokens_per_rank=TOKENS, num_topk=TOP_K, num_total_experts=EXPERTS, hidden=HIDDEN, intermediate=2 * INTER,
        expert_parallel_size=1, expert_parallel_rank=0,
    )  # fmt: skip
    spec = load(tree, api, "select_compile_spec")(
        problem=problem, ep_same_numa_peer_count=0, ep_cross_numa_peer_count=0, num_sms=188, sm_min_partition=8, sm_partition_alignment=8
    )
    bundle = load(tree, api, "build_split_kernels")(spec)
    arguments = {
        **operands(tree, FP4), **scalars("fc1_alpha", "fc2_alpha", "fc1_norm_const"),
        "combine_output": tensor(BF16, TOKENS, TOP_K, HIDDEN), "combine_ready_flags": None, "fc2_block_done_counter": None,
        "local_workspace": tensor(U8, bundle.local_workspace_bytes), "shared_workspace": tensor(U8, bundle.shared_workspace_bytes),
    }  # fmt: skip
    return tree, "sm_120a", bundle.k1, arguments, spec.kernel.k1_sms


def compile_one(make):
    start = time.perf_counter()
    tree, arch, kernel, arguments, clusters = make()
    compiled = cute.compile[cute.GPUArch(arch), cute.KeepCUBIN(True)](kernel, max_active_clusters=clusters, **arguments)
    cubin = compiled.artifacts.CUBIN
    return {
        "tree": tree,
        "class": type(kernel).__name__,
        "arch": arch,
        "elf_sm": struct.unpack_from("<I", cubin, 48)[0] >> 8 & 0xFF,
        "bytes": len(cubin),
        "seconds": round(time.perf_counter() - start, 1),
        "names_of": [other for other in TREES if f"{other}_drop".encode() in cubin],
    }


def signature(function):
    """A signature as Python tells it at run time, every default as ``...``."""
    found = inspect.signature(function)
    plain = [p.replace(annotation=p.empty, default=p.default if p.default is p.empty else ...) for p in found.parameters.values()]
    return str(found.replace(parameters=plain, return_annotation=found.empty)).replace("=Ellipsis", "=...")


def describe(tree):
    """What ``megamoe drop audit`` must find by reading, found here by running."""
    home, names = CONSTANTS[tree]
    signatures = []
    for module, name in CALLABLES[tree]:
        value = load(tree, module, name)
        if inspect.isclass(value):
            signatures.append([module, f"{name}.__init__", signature(value.__init__)])
            if any("__call__" in vars(base) for base in value.__mro__):
                signatures.append([module, f"{name}.__call__", signature(value.__call__)])
        else:
            signatures.append([module, name, signature(value)])
    with drop_imports():
        constants = vars(importlib.import_module(f"{tree}._drop.{home}"))
    return {"signatures": signatures, "constants": [[home, name, constants[name]] for name in names if name in constants]}


def main():
    folder = Path(sys.argv[1]).resolve()
    sys.path.insert(0, str(folder))
    before = list(sys.path)
    good, lacking = import_all(folder)
    described = {tree: describe(tree) for tree in TREES}
    compiled = [compile_one(make) for make in (sm90, sm100, sm120_swapab, sm120_split)]
    tops = sorted({name.partition(".")[0] for name in sys.modules})
    found = {
        "imported": good, "lacking": lacking, "described": described, "compiled": compiled, "path_kept": sys.path == before,
        "strays": [top for top in tops if top in ("common", "src", "tester") or top.startswith("moe_")],
    }  # fmt: skip
    print(MARK, json.dumps(found), sep="\n")


if __name__ == "__main__":
    main()
