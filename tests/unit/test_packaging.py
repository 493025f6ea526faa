# SPDX-License-Identifier: GPL-3.0-or-later
"""What gets shipped, and which way the imports run."""

import ast
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest
import yaml

import gpuops

COLLECTION = PurePosixPath("ansible_collections/gpuops/gpu")
SHIPPED = ("meta", "playbooks", "plugins", "roles")
VERSION = COLLECTION / "galaxy.yml"  # where Ansible reads the collection's version


@pytest.fixture(scope="session")
def wheel_names(root: Path, tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The names in a wheel that goes the long way: from the sdist, not from the checkout."""
    out = tmp_path_factory.mktemp("dist")
    done = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", out, root],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = out.glob("*.whl")
    (_sdist,) = out.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def sources(root: Path, *directories: str) -> set[str]:
    return {
        str(path.relative_to(root))
        for directory in directories
        for path in (root / directory).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_wheel_carries_every_file_of_the_collection(root: Path, wheel_names: set[str]) -> None:
    expected = {str(COLLECTION / name) for name in sources(root, *SHIPPED)}
    assert str(COLLECTION / "meta/runtime.yml") in expected
    assert expected | {str(VERSION)} <= wheel_names


def test_wheel_carries_every_file_of_the_package(root: Path, wheel_names: set[str]) -> None:
    expected = sources(root, "gpuops")
    assert "gpuops/py.typed" in expected
    assert expected <= wheel_names


def test_wheel_carries_nothing_else(wheel_names: set[str]) -> None:
    shipped = {str(COLLECTION / name) for name in SHIPPED}
    for name in map(PurePosixPath, wheel_names):
        assert (
            name.parts[0] == "gpuops"
            or name.parts[0].endswith(".dist-info")
            or name == VERSION
            or any(name.is_relative_to(directory) for directory in shipped)
        ), name
        assert "tests" not in name.parts
        assert "__pycache__" not in name.parts
        assert name.suffix != ".pyc"


def test_versions_agree(root: Path, wheel_names: set[str]) -> None:
    galaxy = yaml.safe_load((root / "galaxy.yml").read_text())
    assert galaxy["version"] == gpuops.__version__
    assert any(name.startswith(f"ansible_gpuops-{gpuops.__version__}.") for name in wheel_names)


def test_ansible_versions_agree(root: Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    runtime = yaml.safe_load((root / "meta/runtime.yml").read_text())
    lowest = runtime["requires_ansible"].removesuffix(".0")
    assert any(dep.startswith(f"ansible-core{lowest},") for dep in project["dependencies"])


def test_symlink_makes_the_checkout_a_collection(root: Path) -> None:
    link = root / "collections" / COLLECTION
    assert link.is_symlink()
    assert not link.readlink().is_absolute()
    assert link.resolve() == root.resolve()


def python_files(root: Path, directory: str) -> Iterator[Path]:
    return (path for path in sorted((root / directory).rglob("*.py")))


def imports(tree: ast.AST) -> Iterator[str]:
    """Every module name that the source imports; a leading dot marks a relative one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            yield base
            dot = "." if node.module else ""
            yield from (f"{base}{dot}{alias.name}" for alias in node.names)


def test_imports_are_seen_in_every_form() -> None:
    source = "import a.b\nfrom c import d\ndef f():\n    from . import e\n    from ..g import h\n"
    assert set(imports(ast.parse(source))) == {"a.b", "c", "c.d", ".", ".e", "..g", "..g.h"}


@pytest.mark.parametrize("directory", ["plugins/module_utils", "plugins/modules"])
def test_what_runs_on_nodes_is_python_38(root: Path, directory: str) -> None:
    for path in python_files(root, directory):
        ast.parse(path.read_text(), filename=str(path), feature_version=(3, 8))


def test_module_utils_know_nothing_of_ansible(root: Path) -> None:
    """The standard library and each other: they are also sent to nodes that have only Python."""
    own = "ansible_collections.gpuops.gpu.plugins.module_utils"
    for path in python_files(root, "plugins/module_utils"):
        for name in imports(ast.parse(path.read_text())):
            sibling = f"{name}.".startswith(f"{own}.") or (name[0] == "." and name[:2] != "..")
            assert sibling or name.split(".")[0] in sys.stdlib_module_names, f"{path}: {name}"


def test_the_package_knows_nothing_of_plugins(root: Path) -> None:
    """gpuops turns what a run said into a report; it learns of processes from nowhere else."""
    for path in python_files(root, "gpuops"):
        for name in imports(ast.parse(path.read_text())):
            assert name.split(".")[0] not in {"ansible_collections", "plugins"}, f"{path}: {name}"


def test_plugins_know_nothing_of_the_package(root: Path) -> None:
    for path in python_files(root, "plugins"):
        for name in imports(ast.parse(path.read_text())):
            assert name.split(".")[0] not in {"gpuops", "tests"}, f"{path}: {name}"
