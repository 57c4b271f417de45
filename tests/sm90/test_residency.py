"""Grids of ranks that share GPUs, and what the driver says about a kernel, with stand-ins for GPU and driver."""

from types import SimpleNamespace

import pytest
import torch

from megamoe import MoEProblem
from megamoe.compile import cubin, occupancy
from megamoe.compile.obtain import obtain
from megamoe.ep.group import Group
from megamoe.errors import BackendUnavailable
from megamoe_sm90 import residency
from megamoe_sm90.shim.ranks import Choice, RanksVariant
from megamoe_sm90.shim.variants import NATIVE_THREADS, Operands

CPU = torch.device("cpu")


def grids(*gpus):
    """CTAs of every rank, from the GPU and the multiprocessors that each sees."""
    return residency.shares([{"gpu": gpu, "seen": seen} for gpu, seen in gpus])


def test_a_rank_with_its_own_gpu_takes_all_of_it():
    assert grids(("a", 132), ("b", 78), ("c", 132)) == [132, 78, 132]


def test_ranks_on_one_gpu_share_what_they_see():
    assert [grids(*[("a", 132)] * ranks)[0] for ranks in (2, 4, 8)] == [66, 33, 16]


def test_ranks_share_what_a_thread_percentage_leaves_because_it_may_leave_all_of_them_the_same():
    for percent, ranks in ((50, 2), (25, 4), (12, 8)):
        seen = 132 * percent // 100 & ~1
        parts = grids(*[("a", seen)] * ranks)
        assert all(parts)
        assert sum(parts) <= seen
    assert grids(("a", 66), ("a", 132)) == [33, 33], "the one that sees least decides"


def test_several_ranks_on_each_of_several_gpus():
    assert grids(("a", 132), ("b", 100), ("a", 132), ("b", 100), ("b", 100)) == [66, 33, 66, 33, 33]


class Sees(Group):
    """A group whose ranks all see the same multiprocessors of one GPU."""

    def gather_bytes(self, payload, device):
        return [payload] * self.size


def test_more_ranks_than_multiprocessors_are_refused_by_name(monkeypatch):
    facts = SimpleNamespace(uuid="GPU-1", multi_processor_count=2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    assert residency.ctas_of(Sees(1, 2, (4, 7)), CPU) == 1
    with pytest.raises(BackendUnavailable, match=r"World ranks \[4, 7, 9\] see \[2, 2, 2\] multiprocessors"):
        residency.ctas_of(Sees(1, 3, (4, 7, 9)), CPU)


class Driver:
    """Counts blocks by registers and shared memory, as a Hopper GPU has them."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=0, CUDA_ERROR_INVALID_VALUE=1)
    CUfunction_attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8)
    CUfunction = int

    def __init__(self, most_shared=227 * 1024):
        self.most_shared, self.loaded, self.allowed, self.registers = most_shared, 0, 0, 0

    def cuLibraryLoadData(self, image, *options):
        self.loaded += 1
        (self.kernel,) = cubin.resources(image)
        return 0, 7

    def cuLibraryGetKernel(self, library, name):
        assert (library, name.decode()) == (7, self.kernel.kernel)
        return 0, 70

    def cuCtxGetDevice(self):
        return 0, 3

    def cuKernelSetAttribute(self, attribute, value, kernel, device):
        assert (attribute, kernel, device) == (8, 70, 3)
        self.allowed = value
        return (0 if value <= self.most_shared else 1,)

    def cuOccupancyMaxActiveBlocksPerMultiprocessor(self, function, threads, shared):
        assert (function, shared) == (70, self.allowed)
        return 0, min(self.most_shared // shared, 65536 // (threads * self.kernel.registers))

    def cuLibraryUnload(self, library):
        self.loaded -= 1
        return (0,)


@pytest.fixture
def variant(tmp_path, monkeypatch):
    monkeypatch.setenv("MEGAMOE_CACHE_DIR", str(tmp_path))
    return RanksVariant.of(MoEProblem(16, 4, 512, 256, 64, "fp8_block128"), 4, Choice(64), Operands(sms=33))


def test_the_driver_is_asked_about_the_compiled_kernel_and_a_kernel_that_does_not_fit_is_refused(variant, monkeypatch):
    data, asked = obtain(variant.request()).object, variant.config.shared_bytes
    driver = Driver()
    assert occupancy.blocks_per_multiprocessor(data, NATIVE_THREADS, asked, driver) == 1, "168 registers leave no room for a second one"
    assert driver.loaded == 0
    tight = Driver(most_shared=asked - 1)
    assert occupancy.blocks_per_multiprocessor(data, NATIVE_THREADS, asked, tight) == 0
    assert tight.loaded == 0

    monkeypatch.setattr(residency, "blocks_per_multiprocessor", lambda *kernel: occupancy.blocks_per_multiprocessor(*kernel, tight))
    with pytest.raises(BackendUnavailable, match=r"world rank 5: .*no CTA of sm90-ranks-64 fits on a multiprocessor: it takes 384 threads"):
        residency.check(Sees(0, 2, (5, 6)), CPU, [variant])
    tight.most_shared = asked
    residency.check(Sees(0, 2, (5, 6)), CPU, [variant])


def test_a_driver_that_fails_is_an_error_of_its_own(variant):
    driver = Driver()
    driver.cuLibraryGetKernel = lambda library, name: (500, None)
    with pytest.raises(RuntimeError, match=r"cuLibraryGetKernel for the kernel .* failed: 500"):
        occupancy.blocks_per_multiprocessor(obtain(variant.request()).object, 384, 1024, driver)
    assert driver.loaded == 0


@pytest.mark.sm90
def test_the_real_driver_runs_one_cta_on_a_multiprocessor(variant):
    torch.zeros(1, device="cuda")
    assert occupancy.blocks_per_multiprocessor(obtain(variant.request()).object, NATIVE_THREADS, variant.config.shared_bytes) == 1
