"""A sweep spread over processes: who measures is alone, everyone gets a turn, and all points come back in order. Without a GPU."""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
import time
from dataclasses import replace
from functools import partial

import pytest
from tests.processes import gone

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
    """Points whose time says for how many tokens the session was."""
    for tokens in sweep.tokens:
        with turns.alone():
            print("libraries print")
        yield point(sweep, tokens, float(sweep.max_tokens))


def raises(sweep, roof, turns):
    raise MegaMoEError(f"{sweep.shapes[0].name} is wrong.", hint="megamoe check")


def crashes(sweep, roof, turns):
    raise ZeroDivisionError("a mistake of ours")


def dies(sweep, roof, turns):
    os._exit(3)


def hangs(sweep, roof, turns):
    time.sleep(600)


def one_point_then(what):
    """Everyone gives a point; then the first shape does as told while the others hang."""
    return partial(_one_point_then, what)


def _one_point_then(what, sweep, roof, turns):
    yield point(sweep, sweep.tokens[0], 1.0)
    (what if sweep.shapes[0].name == "dsv3" else hangs)(sweep, roof, turns)


def test_every_point_comes_once_and_in_order(capfd):
    found = sorted(side_by_side.measure(SWEEP, H200, 3, pretends), key=SWEEP.place)
    assert [(p.format, p.shape, p.tokens) for p in found] == [
        (format, shape, tokens) for format in ("fp8_block128", "bf16") for shape in ("dsv3", "qwen30b") for tokens in (1, 8, 32)
    ]
    assert {p.ms for p in found} == {32.0}, "sessions are for the largest count of the whole sweep"
    assert not multiprocessing.active_children()
    assert "libraries print" not in capfd.readouterr().out


@pytest.mark.parametrize(("jobs", "counts"), [(1, [3, 3, 3, 3]), (4, [3, 3, 3, 3]), (5, [2, 1, 3, 3, 3]), (99, [1] * 12)])
def test_there_are_as_many_parts_as_processes(jobs, counts):
    parts = side_by_side.parts(SWEEP, jobs)
    assert [len(part.tokens) for part in parts] == counts
    assert sorted((part.formats[0], part.shapes[0].name, tokens) for part in parts for tokens in part.tokens) == sorted(
        (format, shape.name, tokens) for format in SWEEP.formats for shape in SWEEP.shapes for tokens in SWEEP.tokens
    )


@pytest.mark.parametrize(
    ("what", "words"),
    [
        (raises, "^dsv3 is wrong. Fix: megamoe check$"),
        (crashes, "(?s)^Measuring dsv3 bf16 failed.*a mistake of ours$"),
        (dies, "dsv3 has died, exit code 3"),
    ],
)
def test_what_goes_wrong_in_a_process_ends_the_run_at_once(what, words):
    found = []
    with pytest.raises(MegaMoEError, match=words):  # noqa: PT012
        for one in side_by_side.measure(replace(SWEEP, formats=["bf16"]), H200, 2, one_point_then(what)):
            found.append(one)
    assert "dsv3" in [one.shape for one in found], "points that came before are kept"
    assert not multiprocessing.active_children()


def test_who_stops_early_leaves_no_process_behind():
    coming = side_by_side.measure(SWEEP, H200, 2, one_point_then(hangs))
    next(coming)
    assert multiprocessing.active_children()
    coming.close()
    assert not multiprocessing.active_children()


def main_process(end, folder):
    """Until it is killed, which leaves its temporary files behind."""
    tempfile.tempdir = str(folder)
    for _ in side_by_side.measure(SWEEP, H200, 2, one_point_then(hangs)):
        end.send([child.pid for child in multiprocessing.active_children()])


def test_processes_end_with_a_parent_that_is_killed(tmp_path):
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    parent = context.Process(target=main_process, args=(there, tmp_path))
    parent.start()
    children = here.recv()
    parent.kill()
    parent.join()
    deadline = time.monotonic() + 30
    while not all(map(gone, children)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


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


def test_points_are_reported_in_order_whatever_the_order_they_come_in(tmp_path, capsys, monkeypatch):
    names, jobs = ["dsv4", "dsv3"], []

    def measure(sweep, roof, count):
        jobs.append(count)
        yield from [point(replace(SWEEP, shapes=[workloads.shape(name)]), tokens, 1.0) for tokens in (8, 1) for name in reversed(names)]

    monkeypatch.setattr("megamoe.cli.bench.require_gpu", lambda command: None)
    monkeypatch.setattr("megamoe.bench.side_by_side.measure", measure)
    file = tmp_path / "r.json"
    assert (
        main(["bench", "--jobs", "7", "--shapes", ",".join(names), "--tokens", "1,8", "--backend", "sm90", "--output", str(file), "--json"])
        == 0
    )
    want = [(name, tokens) for name in names for tokens in (1, 8)]
    for text in (file.read_text(), capsys.readouterr().out):
        assert [(p["shape"], p["tokens"]) for p in json.loads(text)["points"]] == want
    assert jobs == [7]


def test_the_number_of_processes_is_checked(capsys, monkeypatch):
    monkeypatch.setattr("megamoe.cli.bench.require_gpu", lambda command: None)
    assert main(["bench", "--jobs", "0"]) == 2
    assert "--jobs 0; allowed: 1 or more" in capsys.readouterr().err
    assert main(["bench", "--jobs", "2", "--ranks", "2", "--backend", "reference"]) == 2
    assert "--ranks 2 with --jobs" in capsys.readouterr().err
