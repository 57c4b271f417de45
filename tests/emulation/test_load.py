"""Rewritten code under compiled CuTe DSL functions, mostly as far as a machine without a GPU goes: each case in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

PRELUDE = """
import ctypes, json, sys
from megamoe import emulation
from megamoe.emulation import load
assert "cutlass" not in sys.modules and "torch" not in sys.modules

ASKED = []  # what the real loader would have been given

class Runtime:
    def _cudaLibraryLoadData(self, library, image, *rest):
        ASKED.append(ctypes.string_at(image, 64).hex() if not isinstance(image, ctypes.Array) else image.raw[:64].hex())
        return 100  # no device

def functions(instruction, tvm_ffi):
    import cuda.bindings.driver as driver
    import cutlass, cutlass.cute as cute

    @cute.kernel
    def kernel(address: cutlass.Int64):
        cute.arch.inline_ptx(instruction)

    @cute.jit
    def host(address: cutlass.Int64, stream: driver.CUstream):
        kernel(address).launch(grid=[1, 1, 1], block=[128, 1, 1], stream=stream)

    compile = cute.compile[cute.EnableTVMFFI] if tvm_ffi else cute.compile
    compiled = compile(host, cutlass.Int64(0), driver.CUstream(0))
    return (lambda: compiled(0, 0)) if tvm_ffi else (lambda: compiled(cutlass.Int64(0), driver.CUstream(0)))
"""


def run(body, tmp_path):
    """Lines of JSON that the script prints."""
    script = tmp_path / "script.py"  # CuTe DSL reads the source of its kernels
    script.write_text(PRELUDE + textwrap.dedent(body))
    cache = tmp_path.parent / "emulation-cache"  # of all tests of the session: what is built is the same
    settings = {name: value for name, value in os.environ.items() if not name.startswith(("CUTE_DSL_", "MEGAMOE_"))}
    environment = {**settings, "MEGAMOE_CACHE_DIR": str(cache), "HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith(("{", "["))]


@pytest.mark.parametrize("tvm_ffi", [False, True])
def test_the_host_code_is_given_rewritten_code(toolkit, tmp_path, tvm_ffi):
    body = f"""
    with emulation.emulate("sm100") as emulated:
        call = functions("tcgen05.fence::before_thread_sync;", {tvm_ffi})
        (module,) = emulated.modules
        (code, _), = emulated._code.values()
        real, load._runtime = load._runtime, lambda: Runtime()
        try:
            call()
        except Exception as error:
            pass
        told = {{"forms": module.forms, "target": module.target, "code": code[:64].hex(), "error": str(emulated._error)}}
        print(json.dumps({{**told, "asked": ASKED}}))
    """
    (found,) = run(body, tmp_path)
    assert found["forms"] == {"tcgen05.fence": 1}
    assert found["target"] == "sm_100a"
    assert found["asked"], "the host code did not ask for its machine code"
    assert set(found["asked"]) == {found["code"]}, "not the rewritten code"
    assert found["error"] == "None"
    assert not list(tmp_path.glob("megamoe-emulation-*")), "the process has left its folder"


@pytest.mark.emulated
@pytest.mark.parametrize("tvm_ffi", [False, True])
def test_the_host_code_launches_rewritten_code(toolkit, tmp_path, tvm_ffi):
    """A conversion that Hopper lacks, at an address that is part of the code."""
    body = f"""
    import torch
    out = torch.zeros(1, dtype=torch.int16, device="cuda")
    with emulation.emulate("sm100") as emulated:
        call = functions(
            "{{ .reg .f32 two, one; .reg .b8 codes; .reg .b16 word; .reg .b64 to;"
            " mov.b32 two, 0x40000000; mov.b32 one, 0x3f800000; cvt.rn.satfinite.e2m1x2.f32 codes, two, one;"
            f" cvt.u16.u8 word, codes; mov.b64 to, {{out.data_ptr()}};" " st.global.b16 [to], word; }}",
            {tvm_ffi},
        )
        call()
        emulated.check()
        print(json.dumps([out.item(), emulated.modules[0].forms]))
    """
    ((codes, forms),) = run(body, tmp_path)
    assert codes == 0x42
    assert forms == {"cvt f32 to fp4, fp6": 1}


RECORDS = """
from megamoe.emulation.faults import RECORD

class Device:
    \"\"\"One library with a fault record, and a device that is always ready.\"\"\"

    def __init__(self, code):
        self.record = ctypes.create_string_buffer(RECORD.pack(1, code, 0, 0, 64, 0), RECORD.size)
        self.unloaded = []

    def _cudaDeviceSynchronize(self):
        return 0

    def _cudaLibraryGetGlobal(self, address, size, library, name):
        assert name == b"megamoe_fault" and library.value == 4711
        address._obj.value, size._obj.value = ctypes.addressof(self.record), RECORD.size
        return 0

    def _cudaMemcpy(self, to, source, size, kind):
        ctypes.memmove(to, source, size)
        return 0

    def cuda_dialect_unload_library_once(self, state):
        self.unloaded.append(state.value)
"""


@pytest.mark.parametrize("code", [0, 1])
def test_what_a_dropped_function_did_wrong_is_known(toolkit, tmp_path, code):
    """Its library is unloaded with it, so the record is read before."""
    body = f"""
    with emulation.emulate("sm100") as emulated:
        import cuda.bindings.runtime as cuda
        from cutlass.cutlass_dsl.cuda_jit_executor import CudaDialectJitModule

        functions("tcgen05.fence::before_thread_sync;", False)
        load._runtime = lambda device=Device({code}): device
        emulated._loaded.append((4711, emulated.modules[0]))
        module = CudaDialectJitModule(None, None, None, [cuda.cudaLibrary_t(4711)])
        del module
        told = [len(emulated._loaded)]
        for _ in range(2):
            try:
                emulated.check()
                told.append("")
            except emulation.EmulationFault as fault:
                told.append(fault.code)
    print(json.dumps(told))
    """
    (told,) = run(textwrap.dedent(RECORDS) + textwrap.dedent(body), tmp_path)
    assert told == [0, "timeout" if code else "", ""]


def test_functions_for_tvm_ffi_say_when_they_unload(toolkit, tmp_path):
    """CuTe DSL drops the code of its first engine when it makes the one that TVM-FFI calls."""
    body = """
    with emulation.emulate("sm100") as emulated:
        load._runtime = lambda device=Device(0): device
        functions("tcgen05.fence::before_thread_sync;", True)
        print(json.dumps(len(load._runtime().unloaded) * [True]))
    """
    (told,) = run(textwrap.dedent(RECORDS) + textwrap.dedent(body), tmp_path)
    assert told == [True]


def test_what_cannot_be_emulated_raises_when_it_is_compiled(toolkit, tmp_path):
    body = """
    with emulation.emulate("sm100"):
        try:
            functions("{ .reg .b32 a; mov.b32 a, 0; tcgen05.shift.cta_group::1.down [a]; }", False)
        except Exception as error:
            print(json.dumps([type(error).__name__, str(error)]))
    """
    ((name, text),) = run(body, tmp_path)
    assert name == "UnsupportedInstruction"
    assert "tcgen05.shift.cta_group::1.down" in text


def test_code_that_was_compiled_before_is_refused(toolkit, tmp_path):
    body = """
    with emulation.emulate("sm100"):
        pass
    call = functions("tcgen05.fence::before_thread_sync;", False)
    try:
        with emulation.emulate("sm100"):
            try:
                call()
            except Exception:
                pass
    except Exception as error:
        print(json.dumps([type(error).__name__, str(error)]))
    """
    ((name, text),) = run(body, tmp_path)
    assert name == "EmulationError"
    assert "compiled before the emulation began" in text


def test_misuse_is_refused(toolkit, tmp_path):
    body = """
    def refusal(arch):
        try:
            with emulation.emulate(arch):
                pass
        except Exception as error:
            return [type(error).__name__, str(error)]
    told = [refusal("sm90")]
    with emulation.emulate("sm120"):
        told.append(refusal("sm120"))
    told.append(refusal("sm100"))
    print(json.dumps(told))
    """
    (told,) = run(body, tmp_path)
    assert [name for name, _ in told] == ["EmulationError"] * 3
    for (_, text), part in zip(told, ("allowed: sm100, sm103, sm120", "is being emulated already", "reads its settings once"), strict=True):
        assert part in text


def test_check_rewrites_and_assembles_what_a_backend_compiles(toolkit, tmp_path):
    body = """
    from megamoe.cli import _emulated
    from megamoe.compile import KernelRequest

    class Backend:
        def plan(self, problem, *, ranks=1, knobs=None):
            return problem
        def kernels(self, plan, arch=None):
            def build():
                import cuda.bindings.driver as driver
                import cutlass, cutlass.cute as cute

                class Kernel:
                    @cute.kernel
                    def kernel(self, address: cutlass.Int64):
                        cute.arch.inline_ptx(plan)

                    @cute.jit
                    def __call__(self, address: cutlass.Int64, stream: driver.CUstream):
                        self.kernel(address).launch(grid=[1, 1, 1], block=[128, 1, 1], stream=stream)
                return Kernel(), (cutlass.Int64(0), driver.CUstream(0))
            return (KernelRequest("fence", (), {}, arch, build),)

    print(json.dumps([_emulated.rewrite_kernels(Backend(), "tcgen05.fence::before_thread_sync;", 1, "sm100")]))
    """
    (told,) = run(body, tmp_path)
    assert told == ["1 kernels rewritten and assembled for sm_90a, 1 instructions replaced; none launched"]


def test_check_says_what_has_no_kernels():
    command = [sys.executable, "-m", "megamoe", "check", "--emulate", "sm100", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    document = json.loads(done.stdout)
    assert document["ok"] is True
    found = {f["backend"]: f for f in document["findings"]}
    assert found["reference"]["step"] == "emulate"
    assert "no kernels for sm100" in found["reference"]["detail"]
    assert done.returncode == (0 if document["ran"] else 3)
