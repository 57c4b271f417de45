"""Discovery in whole processes: threads, forks, crowded environments, users' own folders, and Pythons without a site."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import threading
import zipapp
from pathlib import Path

import pytest

import megamoe
from megamoe import catalog

from .stopwatch import assert_within
from .wheels import Site, see_only

PACKAGE = Path(megamoe.__file__).parent


def python(*arguments, cwd=None, **variables):
    """Run this Python with planted settings; returns what it printed."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MEGAMOE_", "PYTHON"))}
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, cwd=cwd, env={**environment, **variables}, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_threads_share_one_look(tmp_path, monkeypatch):
    site = Site(tmp_path)
    see_only(monkeypatch, tmp_path)
    counter = tmp_path / "imports"
    site.wheel("m", f"import time\ntime.sleep(0.2)\nopen({str(counter)!r}, 'a').write('x')\nSPEC = 1\n")
    gate = threading.Barrier(8)
    seen = []

    def ask():
        gate.wait()
        seen.append(catalog.backends())

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(seen) == 8
    assert all(records is seen[0] for records in seen)
    assert counter.read_text() == "x"


ARCH_WHEELS = [name for name in ("sm90", "sm100", "sm120") if importlib.util.find_spec(f"megamoe_{name}")]


@pytest.mark.skipif(not ARCH_WHEELS, reason="no arch wheel is installed here")
def test_all_installed_wheels_live_in_one_process():
    code = f"""
import importlib, megamoe
specs = {{name: importlib.import_module(f'megamoe_{{name}}').SPEC for name in {ARCH_WHEELS!r}}}
found = {{r.name: r for r in megamoe.backends()}}
for name, spec in specs.items():
    r = found[name]
    assert r.spec is spec and spec.name == name, r
    assert r.state in ('ok', 'unavailable'), r
    assert (r.distributions[0].name, r.version) == (f'megamoe-{{name}}', megamoe.__version__), r
    assert (r.state == 'ok') <= (not spec.missing), r
assert found['reference'].state == 'ok'
"""
    python("-c", code)


FORK = """
import os, sys, threading, time
from megamoe import catalog
names = [r.name for r in catalog.backends()]
held = threading.Event()
def hold():
    with catalog._lock:
        held.set()
        time.sleep(60)
threading.Thread(target=hold, daemon=True).start()
held.wait()
child = os.fork()
if child == 0:
    import signal
    signal.alarm(30)  # a child that waits for the parent's thread is ended, and fails
    os._exit(0 if [r.name for r in catalog.backends(refresh=True)] == names else 1)
sys.exit(os.waitpid(child, 0)[1])
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_fork_while_another_thread_looks_does_not_hang():
    python("-W", "ignore", "-c", FORK)


@pytest.mark.alone
def test_five_hundred_unrelated_distributions_cost_little(tmp_path, monkeypatch):
    site = Site(tmp_path)
    for i in range(500):
        entries = f"[console_scripts]\nrun{i} = package{i}:main\n" if i % 2 else ""
        site.info(f"package-{i}", "1.0", entries=entries, requires=[f"package-{i + 1}"] * 20)
    site.backend("m", ())
    see_only(monkeypatch, tmp_path)
    assert_within(0.15, lambda: catalog.backends(refresh=True))
    assert [r.name for r in catalog.backends()] == ["m", "reference"]


def test_a_users_own_common_and_src_stay_theirs(tmp_path):
    for name in ("common", "src", "catalog", "metadata", "shim"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise AssertionError('the user\\'s {name} was imported')\n")
    script = """
import sys
before = list(sys.path), set(sys.modules)
import megamoe, importlib.util
records = megamoe.backends()
assert sys.path == before[0], sys.path
ours = {m.partition('.')[0] for m in set(sys.modules) - before[1]} & {'common', 'src', 'catalog', 'metadata', 'shim'}
assert not ours, ours
for name in ('common', 'src'):
    assert importlib.util.find_spec(name).origin.startswith(sys.argv[1])
print([(r.name, r.state) for r in records if r.state == 'broken'])
"""
    (tmp_path / "main.py").write_text(script)
    assert python("main.py", str(tmp_path), cwd=tmp_path).strip() == "[]"


def test_without_site_packages_core_still_answers(tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "megamoe", ignore=shutil.ignore_patterns("__pycache__"))
    listing = json.loads(python("-S", "-m", "megamoe", "backends", "--json", PYTHONPATH=str(tmp_path)))
    assert [(b["name"], b["state"]) for b in listing["backends"]] == [("reference", "ok")]


def test_from_a_zip_with_its_wheels(tmp_path):
    app = tmp_path / "app"
    shutil.copytree(PACKAGE, app / "megamoe", ignore=shutil.ignore_patterns("__pycache__"))
    Site(app).backend("zipped", (), version="7.8")
    (app / "__main__.py").write_text("import sys\nfrom megamoe.cli import main\nsys.exit(main())\n")
    zipapp.create_archive(app, tmp_path / "app.pyz")
    listing = json.loads(python("-S", str(tmp_path / "app.pyz"), "backends", "--json", cwd=tmp_path))
    assert [(b["name"], b["state"]) for b in listing["backends"]] == [("reference", "ok"), ("zipped", "ok")]
    assert listing["backends"][1]["distributions"][0]["version"] == "7.8"
    assert "usage: megamoe" in python("-S", str(tmp_path / "app.pyz"), "--help", cwd=tmp_path)
