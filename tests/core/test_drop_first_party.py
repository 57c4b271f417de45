"""The drops of our own wheels, wherever they are installed: kernels keep to their namespace, shims find what they rely on."""

import shutil

import pytest

from megamoe.drop import contract, manifest
from megamoe.drop.audit import audit
from megamoe.drop.locate import find_package, installed_drops
from megamoe.drop.parameters import render
from megamoe.drop.symbols import Index
from megamoe.drop.verify import verify

WHEELS = ("megamoe_sm90", "megamoe_sm100", "megamoe_sm120")


def test_every_arch_wheel_carries_a_drop():
    assert {path.name for path in installed_drops()} >= set(WHEELS)


@pytest.mark.parametrize("wheel", WHEELS)
def test_verify_and_audit(wheel):
    verified, audited = verify(wheel), audit(wheel)
    assert verified.problems == ()
    assert audited.problems == ()
    assert verified.manifest.first_party
    assert not verified.files or contract.read(verified.package).signatures


@pytest.mark.parametrize("wheel", WHEELS)
def test_every_stated_signature_guards_its_kernel(wheel, tmp_path):
    """A copy of the wheel in which an argument of one stated callable is renamed must fail, for each of them."""
    package = find_package(wheel)
    stated = contract.read(package)
    if stated is None:
        assert manifest.kernel_files(package) == {}, "kernels without a contract"
        pytest.skip(f"{wheel} has no kernels yet")
    index = Index({name: path.read_bytes() for name, path in manifest.kernel_files(package).items()}, f"{wheel}._drop")
    for number, signature in enumerate(stated.signatures):
        symbol, arguments = index.signature(index.find(signature.module, signature.name))
        names = {parameter.name for parameter in signature.parameters}
        last = [argument for argument in (*arguments.args, *arguments.kwonlyargs) if argument.arg in names][-1]
        copy = shutil.copytree(package, tmp_path / str(number) / wheel)
        path = copy / "_drop" / symbol.module.path
        lines = path.read_text().splitlines(keepends=True)
        line = lines[last.lineno - 1]
        lines[last.lineno - 1] = line[: last.col_offset] + line[last.col_offset :].replace(last.arg, f"{last.arg}_", 1)
        path.write_text("".join(lines))
        problems = audit(copy).problems
        where = f"{signature.module}.{signature.name}{render(list(signature.parameters))}"
        assert any(problem.file == str(path) and f"parameter {last.arg!r} was" in problem.text for problem in problems), (where, problems)
