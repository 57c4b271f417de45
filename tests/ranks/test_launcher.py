"""The launcher that users and all rank tests rely on: results by rank, every failure reported for its rank, and nothing left behind."""

import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.processes import gone

from megamoe.errors import MegaMoEError
from megamoe.testing.launcher import RanksFailed, launch


def summed(rank, factor):
    total = torch.tensor([rank * factor])
    dist.all_reduce(total)
    return rank, int(total), os.environ.get("MEGAMOE_TEST_WORD")


def returns_at_once(rank):
    return rank


def networks(rank):
    names = ("GLOO_SOCKET_IFNAME", "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME", "NVSHMEM_REMOTE_TRANSPORT")
    return [os.environ[name] for name in names]


def threads(rank):
    """Threads that torch takes, and those that numpy started."""
    before = len(os.listdir("/proc/self/task"))
    import numpy as np

    np.ones((500, 500)) @ np.ones((500, 500))
    return torch.get_num_threads(), len(os.listdir("/proc/self/task")) - before


def raises(rank):
    if rank == 1:
        raise KeyError("from rank one")
    dist.barrier()


def all_raise(rank):
    dist.barrier()
    raise KeyError(f"from rank {rank}")


def cannot_return(rank):
    return (lambda: rank) if rank else None


def dies(rank):
    if rank == 1:
        os._exit(3)
    return rank


NAP = 600


def loses_its_peer(rank):
    """The survivor finds out and goes on: it returns or it raises."""
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError):
        dist.barrier()
    time.sleep(1.0)
    if rank == 1:
        raise KeyError("the peer is gone")


def raises_and_sleeps(rank):
    if rank == 1:
        raise KeyError("from rank one")
    time.sleep(NAP)


def sleeps(rank):
    if rank == 1:
        time.sleep(NAP)


def tells_who_it_is(rank, folder):
    word = Path(folder, f"{rank}.word")
    word.write_text(json.dumps([os.getpid(), os.getppid()]))
    word.rename(word.with_suffix(".pids"))
    time.sleep(NAP)


def speaks(rank):
    print("a library has a word to say")
    os.write(1, b"another writes it outside Python\n")


def test_results_by_rank():
    assert launch(summed, 3, 10) == [(0, 30, None), (1, 30, None), (2, 30, None)]
    assert launch(summed, 2, 1, env={"MEGAMOE_TEST_WORD": "yes"}) == [(0, 1, "yes"), (1, 1, "yes")]
    assert launch(summed, 1, 1) == [(0, 0, None)]


def test_a_rank_that_returns_at_once_does_not_leave_before_all_are_there():
    for _ in range(6):
        assert launch(returns_at_once, 4) == [0, 1, 2, 3]


def test_ranks_of_one_machine_need_no_network_unless_the_user_says_otherwise(monkeypatch):
    for name in ("GLOO_SOCKET_IFNAME", "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME", "NVSHMEM_REMOTE_TRANSPORT"):
        monkeypatch.delenv(name, raising=False)
    (one, two, transport), second = launch(networks, 2)
    assert one == two
    assert one.startswith("lo")
    assert transport == "none"
    assert second == [one, two, transport]
    assert launch(networks, 1, env={"NVSHMEM_REMOTE_TRANSPORT": "ibrc"}) == [[one, two, "ibrc"]]


def test_ranks_share_the_cores_unless_the_user_says_otherwise():
    """Threads of numpy are decided when it is loaded, so by the first launch of a process."""
    for given, threads in (({}, max(1, os.cpu_count() // 2)), ({"OMP_NUM_THREADS": "2"}, 2)):
        env = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")} | given
        code = "from tests.ranks import test_launcher as here; print(here.launch(here.threads, 2))"
        ran = subprocess.run(
            [sys.executable, "-c", code], cwd=Path(__file__).parents[2], env=env, capture_output=True, text=True, check=True, timeout=100
        )
        started = min(int(given.get("OMP_NUM_THREADS", 1)), os.cpu_count()) - 1
        assert ran.stdout.strip() == str([(threads, started)] * 2)


def test_an_exception_comes_with_its_traceback():
    with pytest.raises(RanksFailed, match="from rank one") as caught:
        launch(raises, 2)
    assert isinstance(caught.value, MegaMoEError)
    assert caught.value.first == 1
    assert "2 of 2 ranks failed, rank 1 first:\n---- rank 1\n" in str(caught.value)
    assert "in raises" in caught.value.errors[1]
    assert "KeyError" in caught.value.errors[1]
    assert "in raises" in caught.value.errors[0], "the barrier that lost a rank"


def test_every_rank_that_raises_is_reported():
    with pytest.raises(RanksFailed, match="3 of 3 ranks failed") as caught:
        launch(all_raise, 3)
    for rank in range(3):
        assert f"KeyError: 'from rank {rank}'" in caught.value.errors[rank]


def test_what_cannot_be_returned_is_the_error_of_its_rank():
    with pytest.raises(RanksFailed, match="pickle") as caught:
        launch(cannot_return, 2)
    assert list(caught.value.errors) == [1]


def test_a_process_that_dies_is_reported():
    with pytest.raises(RanksFailed, match="ended without a report, exit code 3") as caught:
        launch(dies, 2)
    assert list(caught.value.errors) == [1]
    assert caught.value.first == 1


def test_survivors_of_a_killed_rank_finish_or_report():
    with pytest.raises(RanksFailed, match="ended without a report, exit code -9") as caught:
        launch(loses_its_peer, 3)
    assert list(caught.value.errors) == [1, 2]
    assert caught.value.first == 2
    assert "the peer is gone" in caught.value.errors[1]


def test_a_rank_that_hangs_is_ended_and_says_where_it_was():
    start = time.monotonic()
    launch(summed, 2, 1)
    enough = 5 + 5 * (time.monotonic() - start)  # for two processes to come to their work, on this machine as it is now
    start = time.monotonic()
    with pytest.raises(RanksFailed, match="in sleeps") as caught:
        launch(sleeps, 2, timeout=enough)
    assert list(caught.value.errors) == [1]
    assert caught.value.first is None
    assert caught.value.errors[1].count("Thread 0x") == 1, "the one that hangs"
    assert time.monotonic() - start < enough + NAP / 2


def test_a_rank_that_hangs_after_another_failed_does_not_use_up_the_time():
    start = time.monotonic()
    with pytest.raises(RanksFailed, match="in raises_and_sleeps") as caught:
        launch(raises_and_sleeps, 2, timeout=250.0)
    assert caught.value.first == 1
    assert "it was at" in caught.value.errors[0]
    assert time.monotonic() - start < 200


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def test_this_process_keeps_its_signals_and_its_logs(capfd, caplog):
    caplog.set_level(logging.INFO)
    handlers = [signal.getsignal(number) for number in SIGNALS]
    with pytest.raises(RanksFailed):
        launch(dies, 2)
    assert [signal.getsignal(number) for number in SIGNALS] == handlers
    output, errors = capfd.readouterr()
    assert output == ""
    assert "exitcode" not in errors, "torchrun's own report of it"
    assert not caplog.records
    logging.getLogger("torch.distributed.elastic.agent.server.api").warning("as before")
    assert [record.message for record in caplog.records] == ["as before"]


def waits(condition, seconds):
    end = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < end:
        time.sleep(0.05)
    return found


@pytest.fixture
def temporary(tmp_path_factory):
    """Where a program has its temporary files; a short name, as sockets need."""
    return tmp_path_factory.mktemp("t")


@pytest.fixture
def program(tmp_path, temporary):
    """Starts a program that launches a function of this module on two ranks and prints the results."""
    file = tmp_path / "program.py"
    file.write_text(
        "import sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n"
        "from tests.ranks import test_launcher as here\n"
        "if __name__ == '__main__':\n"
        "    try:\n"
        "        print(here.launch(getattr(here, sys.argv[1]), 2, *sys.argv[2:]))\n"
        "    except KeyboardInterrupt:\n"
        "        sys.exit(1)\n"
    )
    started = []

    def start(*words):
        environment = {**os.environ, "TMPDIR": str(temporary)}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen([sys.executable, file, *words], start_new_session=True, env=environment, **pipes))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("send", "number", "code"),
    [
        pytest.param(os.killpg, signal.SIGINT, 1, id="Ctrl-C in a terminal"),
        pytest.param(os.kill, signal.SIGTERM, 128 + signal.SIGTERM, id="kill"),
        pytest.param(os.kill, signal.SIGKILL, -signal.SIGKILL, id="kill -9"),
    ],
)
def test_whatever_ends_the_process_ends_its_ranks(program, temporary, tmp_path, send, number, code):
    process = program("tells_who_it_is", str(tmp_path))
    assert waits(lambda: len(list(tmp_path.glob("*.pids"))) == 2, 100), process.poll()
    send(process.pid, number)
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, output) == (code, "")
    if number != signal.SIGKILL:
        assert "Traceback" not in errors
        assert list(temporary.iterdir()) == []
    pids = {pid for file in tmp_path.glob("*.pids") for pid in json.loads(file.read_text())}
    assert len(pids) == 3, "two ranks, and the process that they were forked from"
    assert waits(lambda: all(map(gone, pids)), 30)


def test_what_ranks_print_does_not_mix_with_the_output(program):
    output, errors = program("speaks").communicate(timeout=100)
    assert output == "[None, None]\n"
    assert errors.count("a library has a word to say\n") == 2
    assert errors.count("another writes it outside Python\n") == 2
