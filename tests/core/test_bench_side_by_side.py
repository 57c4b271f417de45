"""A sweep spread over processes: who measures is alone, everyone gets a turn, and all points come back in order. Without a GPU."""

from __future__ import annotations

import multiprocessing
import os
import time

import pytest

from megamoe.bench import side_by_side, workloads
from megamoe.bench.points import Sweep
from megamoe.bench.results import Point
from megamoe.bench.roof import H200
from megamoe.bench.turns import SharedTurns
from megamoe.cli import main
from megamoe.errors import MegaMoEError

SWEEP = Sweep(
    shapes=[workloads.shape("dsv3"), workloads.shape("qwen30b")],
    formats=["fp8_block128", "bf16"],
    tokens=[1, 8, 32],
    routing="random",
    backend="sm90",
)


def point(sweep, tokens, ms):
    return Point(
        *(sweep.shapes[0].name, tokens, sweep.formats[0], sweep.routing, ms),
        **{"spread": 0.0, "floor_ms": 1.0, "touched": 1.0, "tflops": 1.0, "tb_s": 1.0},
    )


def pretends(sweep, roof, turns):
    """Points whose time says how many token counts came with them, and for how many the session was."""
    with turns.alone():
        pass
    return [point(sweep, tokens, 1000.0 * sweep.max_tokens + len(sweep.tokens)) for tokens in sweep.tokens]


def fails(sweep, roof, turns):
    raise MegaMoEError(f"{sweep.shapes[0].name} is wrong.", hint="megamoe check")


def dies(sweep, roof, turns):
    os._exit(3)


@pytest.mark.parametrize(("jobs", "each"), [(1, [3]), (4, [3]), (5, [1, 2]), (12, [1])])
def test_every_point_comes_once_and_in_order(jobs, each):
    found = sorted(side_by_side.measure(SWEEP, H200, min(jobs, 4), pretends), key=SWEEP.place)
    assert [(p.format, p.shape, p.tokens) for p in found] == [
        (format, shape, tokens) for format in ("fp8_block128", "bf16") for shape in ("dsv3", "qwen30b") for tokens in (1, 8, 32)
    ]
    assert {p.ms // 1000 for p in found} == {32}, "sessions are for the largest count of the whole sweep"
    parts = side_by_side.parts(SWEEP, jobs)
    assert sorted({len(part.tokens) for part in parts}) == each
    assert len(parts) >= min(jobs, 12)


@pytest.mark.parametrize(("work", "words"), [(fails, "is wrong"), (dies, "has died")])
def test_what_goes_wrong_in_a_process_ends_the_run(work, words):
    with pytest.raises(MegaMoEError, match=words):
        list(side_by_side.measure(SWEEP, H200, 2, work))


def comes_and_goes(barrier, folder, log, alone, times):
    turns = SharedTurns(folder)
    barrier.wait(60)
    for _ in range(times):
        with turns.alone() if alone else turns.together():
            start = time.monotonic()
            time.sleep(0.02)
            with log.open("a") as file:
                file.write(f"{int(alone)} {start} {time.monotonic()}\n")


def test_who_is_alone_is_alone_and_gets_a_turn_while_others_keep_coming(tmp_path):
    log, context = tmp_path / "log", multiprocessing.get_context("spawn")
    folder = tmp_path / "turns"
    folder.mkdir()
    barrier = context.Barrier(4)
    processes = [context.Process(target=comes_and_goes, args=(barrier, folder, log, alone, 12)) for alone in (True, False, False, True)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 4
    stays = [tuple(map(float, line.split())) for line in log.read_text().splitlines()]
    assert len(stays) == 48
    alone = [(start, end) for kind, start, end in stays if kind]
    for start, end in alone:
        beside = [stay for stay in stays if stay[1] < end and stay[2] > start]
        assert len(beside) == 1
    last = max(start for kind, start, _ in stays if not kind)
    assert sum(start < last for start, _ in alone) >= 4


def test_the_number_of_processes_is_checked(capsys, monkeypatch):
    monkeypatch.setattr("megamoe.cli.bench.require_gpu", lambda command: None)
    assert main(["bench", "--jobs", "0"]) == 2
    assert "--jobs 0; allowed: 1 or more" in capsys.readouterr().err
    assert main(["bench", "--jobs", "2", "--ranks", "2", "--backend", "reference"]) == 2
    assert "--ranks 2 with --jobs" in capsys.readouterr().err
