"""What is inside the sdists and wheels in dist/."""

import io
import tarfile
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.environment("inspect")

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"megamoe_core": "megamoe", "megamoe_sm90": "megamoe_sm90", "megamoe_sm100": "megamoe_sm100", "megamoe_sm120": "megamoe_sm120"}


def only(pattern):
    found = list((ROOT / "dist").glob(pattern))
    assert len(found) == 1, f"{pattern}: {found}"
    return found[0]


def sources(name):
    """The package's files in the checkout, by their path in the wheel."""
    folder = ROOT / "packages" / name.replace("_", "-") / "src"
    package = folder / PACKAGES[name]
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.mark.parametrize(("name", "package"), PACKAGES.items())
def test_wheel_holds_the_package_and_nothing_else(name, package):
    with zipfile.ZipFile(only(f"{name}-*.whl")) as wheel:
        info = [file for file in wheel.namelist() if ".dist-info/" in file]
        packed = {file: wheel.read(file) for file in wheel.namelist() if file not in info}
        licences = [wheel.read(file) for file in info if file.endswith("/licenses/LICENSE")]
    assert packed == sources(name)
    assert f"{package}/py.typed" in packed
    assert {file.split("/")[0] for file in packed} == {package}
    assert licences == [(ROOT / "LICENSE").read_bytes()]


@pytest.mark.parametrize("name", PACKAGES)
def test_sdist_unpacks_safely_and_holds_the_licence_text(name, tmp_path):
    with tarfile.open(fileobj=io.BytesIO(only(f"{name}-*.tar.gz").read_bytes())) as sdist:
        sdist.extractall(tmp_path, filter="data")
    (folder,) = tmp_path.iterdir()
    assert (folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert not [path for path in folder.rglob("*") if path.is_symlink()]
    packed = {path.relative_to(folder / "src").as_posix(): path.read_bytes() for path in (folder / "src").rglob("*") if path.is_file()}
    assert packed == sources(name)
