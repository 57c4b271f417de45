"""The folder of compiled objects and the fingerprints, without a compiler."""

from __future__ import annotations

import hashlib
import multiprocessing
import sys
import time
from pathlib import Path

import pytest

from megamoe.compile import KernelRequest, sources
from megamoe.compile.obtain import obtain
from megamoe.compile.store import Store
from megamoe.errors import MegaMoEError

DIGEST = "ab" * 32


def test_round_trip(tmp_path):
    store = Store(tmp_path / "not" / "yet")
    assert store.load(DIGEST) is None
    assert store.entries() == ()
    store.save(DIGEST, {"name": "toy", "config": {"tile": 64}}, b"object", 1.5)
    entry = store.load(DIGEST)
    assert entry is not None
    assert entry.path.read_bytes() == b"object"
    assert (entry.key["name"], entry.key["config"], entry.seconds, entry.nbytes) == ("toy", {"tile": 64}, 1.5, 6)
    assert [e.digest for e in store.entries()] == [DIGEST]
    assert store.clear() == 1
    assert list(store.root.iterdir()) == []


@pytest.mark.parametrize(
    ("suffix", "content"),
    [
        ("o", b""),  # cut off
        ("o", b"objecu"),  # same length, one bit off
        ("json", b"{"),
        ("json", b"[]"),  # sound JSON of the wrong shape
        ("json", b'{"key": 3, "sha256": 5, "seconds": "x"}'),
    ],
)
def test_damaged_entry_is_a_miss(tmp_path, suffix, content):
    store = Store(tmp_path)
    store.save(DIGEST, {"name": "toy"}, b"object", 1.0)
    (tmp_path / f"{DIGEST}.{suffix}").write_bytes(content)
    assert store.load(DIGEST) is None
    assert store.entries() == ()
    store.save(DIGEST, {"name": "toy"}, b"object", 1.0)
    assert store.load(DIGEST) is not None


def test_object_without_its_note_is_not_an_entry(tmp_path):
    store = Store(tmp_path)
    store.save(DIGEST, {"name": "toy"}, b"object", 1.0)
    (tmp_path / f"{DIGEST}.json").unlink()
    assert store.load(DIGEST) is None


class _Vanishing(Store):
    """Another process clears the folder as soon as an entry has been read."""

    def read(self, digest):
        found = super().read(digest)
        self.clear()
        return found


def test_an_entry_that_is_removed_after_its_check_is_still_used(tmp_path, monkeypatch):
    store = _Vanishing(tmp_path)
    store.save(DIGEST, {"name": "toy"}, b"object", 1.5)
    request = KernelRequest("toy", (), {}, "sm_90a", lambda: pytest.fail("compiled again"))
    monkeypatch.setattr(KernelRequest, "digest", lambda _: DIGEST)
    got = obtain(request, store)
    assert (got.object, got.hit, got.seconds) == (b"object", True, 1.5)
    assert not list(tmp_path.glob("*.o"))


def _hold_and_write(root: str, log: str) -> None:
    with Store(Path(root)).lock(DIGEST):
        with Path(log).open("a") as handle:
            handle.write("in\n")
        time.sleep(0.05)
        with Path(log).open("a") as handle:
            handle.write("out\n")


def test_lock_lets_one_process_in_at_a_time(tmp_path):
    context = multiprocessing.get_context("spawn")
    log = tmp_path / "log"
    workers = [context.Process(target=_hold_and_write, args=(str(tmp_path / "store"), str(log))) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(240)
        assert worker.exitcode == 0
    assert log.read_text().split() == ["in", "out"] * 4


def test_lock_is_given_up_after_its_deadline(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("megamoe.compile.store.LOCK_SECONDS", 0.1)
    store = Store(tmp_path)
    with store.lock(DIGEST), store.lock(DIGEST):
        pass
    assert "compiling without it" in caplog.text


def _package(root: Path, name: str, files: dict[str, str]) -> None:
    for file, text in files.items():
        path = root / name / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_fingerprint_sees_bytes_and_names_but_not_places(tmp_path, monkeypatch):
    files = {"__init__.py": "", "kernel.py": "x = 1\n", "deep/part.py": "y = 2\n"}

    def of(folder, changed):
        _package(tmp_path / folder, "fingerprinted", {**files, **changed})
        monkeypatch.setattr(sys, "path", [str(tmp_path / folder), *sys.path])
        return sources.fingerprint(("fingerprinted",))

    base = of("here", {})
    assert base == of("there", {})
    assert base != of("comment", {"kernel.py": "x = 1  # why\n"})
    assert base != of("more", {"new.py": ""})
    assert base != of("moved", {"deep/part.py": "", "deep/other.py": "y = 2\n"})
    assert base == of("cached", {"__pycache__/kernel.cpython-311.pyc": "z"})


def test_fingerprint_of_nothing_is_an_error():
    with pytest.raises(MegaMoEError, match="no_such_package_at_all"):
        sources.fingerprint(("no_such_package_at_all",))


def test_fingerprint_is_plain_sha256_of_named_sized_files(tmp_path, monkeypatch):
    _package(tmp_path, "fingerprinted2", {"__init__.py": "a"})
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert sources.fingerprint(("fingerprinted2",)) == hashlib.sha256(b"fingerprinted2/__init__.py\x001\x00a").hexdigest()
