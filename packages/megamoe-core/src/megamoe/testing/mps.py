"""Several ranks on one GPU: CUDA's Multi-Process Service (MPS) runs the kernels of all their processes at the same time.

with serving(ranks=4) as env:
    launch(work, 4, env=env)

Without it the GPU gives each process a slice of time, and a kernel that waits for its peer waits for the next slice.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megamoe import env, nvml
from megamoe.errors import BackendUnavailable

CONTROL = "nvidia-cuda-mps-control"
SHARED = {"NVSHMEM_IGNORE_CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "1", "NVSHMEM_DISABLE_NCCL": "1"}
"""What NVSHMEM needs on a shared GPU: without thread percentages that add up to 100 it takes its processes for ones that run in turn."""
_SECONDS = 30


def available() -> bool:
    """Whether the service runs already or can be started."""
    return (env.mps_pipe() / "control").exists() or shutil.which(CONTROL) is not None


@contextmanager
def serving(ranks: int) -> Iterator[dict[str, str]]:
    """Environment variables for the ranks' processes; what is started here ends with the block.

    Nothing is started where every rank has a GPU of its own, where there is none (both need no variables), and where the service runs
    already. No thread percentage is set: ranks that share a GPU choose how many multiprocessors they take.

    Args:
        ranks: number of processes.

    Raises:
        BackendUnavailable: the service is needed and cannot be started.
    """
    gpus = nvml.gpus().devices
    if not gpus or len(gpus) >= ranks:
        yield {}
        return
    if (env.mps_pipe() / "control").exists():
        yield dict(SHARED)
        return
    with tempfile.TemporaryDirectory(prefix="megamoe-mps-") as folder:
        places = {"CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log"}
        for place in places.values():
            Path(place).mkdir()
        _control(places, "-d", needed_for=f"{ranks} ranks on {len(gpus)} GPU{'s' * (len(gpus) > 1)}")
        try:
            yield {**SHARED, **places}
        finally:
            _control(places, command="quit", needed_for="ending it")


def _control(places: dict[str, str], *arguments: str, needed_for: str, command: str = "") -> None:
    tool = shutil.which(CONTROL)
    if tool is None:
        raise BackendUnavailable(
            f"{needed_for} need CUDA MPS, and {CONTROL} is not on the path.", hint="install it with the NVIDIA driver, or use fewer ranks"
        )
    try:
        done = subprocess.run(
            [tool, *arguments], input=command, env=env.with_variables(places), capture_output=True, text=True, timeout=_SECONDS
        )
        said = (done.stderr or done.stdout).strip()
        problem = f"exit code {done.returncode} {said}".strip() if done.returncode else ""
    except subprocess.TimeoutExpired:
        problem = f"no answer in {_SECONDS} s"
    if problem:
        raise BackendUnavailable(f"{needed_for}: CUDA MPS failed: {problem}.", hint=f"run {CONTROL} {' '.join(arguments)} by hand")
