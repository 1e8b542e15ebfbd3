"""Installing: what is in the archives, and what happens without a compiler or without torch."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
IGNORED = shutil.ignore_patterns(".*", "__pycache__", "*.so", "*.egg-info", "build", "dist", "demo_out")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    return shutil.copytree(ROOT, tmp_path_factory.mktemp("checkout") / "fused8", ignore=IGNORED)


def build(checkout, what, **environment):
    """Run setup.py in a fresh copy; its output, and the one archive it made."""
    shutil.rmtree(checkout / "dist", ignore_errors=True)
    shutil.rmtree(checkout / "build", ignore_errors=True)
    done = subprocess.run(
        [sys.executable, "setup.py", what],
        cwd=checkout,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    return done, list((checkout / "dist").glob("*"))


def check_installation_without_library(wheel, where):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(where)
    assert {"fused8/__init__.py", "fused8/py.typed", "fused8/triton_kernels/__init__.py"} <= set(names)
    assert not [name for name in names if name.endswith(".so") or name.startswith("tests")]
    program = (
        "import torch, fused8; p = torch.nn.Parameter(torch.ones(64, 64)); p.grad = torch.ones(64, 64);"
        "o = fused8.AdamW8bit([p]); o.step(); o.step(); print(fused8.__file__, p[0, 0].item())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=where,
        env=os.environ | {"PYTHONPATH": str(where)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(where)) and float(done.stdout.split()[-1]) < 1
    assert done.stderr.count("compiled library is missing") == 1


def test_without_a_compiler_installation_succeeds_and_says_what_to_do(checkout, tmp_path):
    done, (wheel,) = build(checkout, "bdist_wheel", CXX="no-such-compiler")
    assert done.returncode == 0, done.stdout
    advice = [line for line in done.stdout.splitlines() if line.startswith("fused8: the compiled kernels were not")]
    assert len(advice) == 1 and "compiler" in advice[0]
    check_installation_without_library(wheel, tmp_path)


def test_a_build_can_be_required_or_left_out(checkout):
    done, archives = build(checkout, "bdist_wheel", CXX="no-such-compiler", FUSED8_REQUIRE_BUILD="1")
    assert done.returncode != 0 and not archives
    done, (wheel,) = build(checkout, "bdist_wheel", FUSED8_NO_BUILD="1")
    assert done.returncode == 0 and wheel.name.endswith("py3-none-any.whl")


def test_source_archive_can_build_the_library(checkout):
    done, (archive,) = build(checkout, "sdist", FUSED8_NO_BUILD="1")
    assert done.returncode == 0, done.stdout
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*") if path.is_file()}
    assert sources <= names and {"LICENSE", "README.md", "setup.py", "triton_kernels/__init__.py"} <= names


def test_import_needs_neither_triton_nor_numpy_nor_the_extras():
    program = (
        "import sys; import torch; before = set(sys.modules); import fused8;"
        "new = {name.split('.')[0] for name in set(sys.modules) - before}; print(sorted(new))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert not {"triton", "rich", "matplotlib", "transformers", "bitsandbytes"} & set(eval(done.stdout))


def test_third_party_names_all_packages_that_are_asked_for_and_no_others():
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has no tomllib")
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = pyproject["project"]
    asked_for = [*pyproject["build-system"]["requires"], *project["dependencies"]]
    asked_for += [package for extra in project["optional-dependencies"].values() for package in extra]
    asked_for += re.findall(r"^[^#\n].*", (ROOT / "bench" / "requirements.txt").read_text(), re.MULTILINE)
    # What `make` installs for pip to build with.
    asked_for += re.search(r"pip install --quiet '\$\(TORCH\)' (.+)", (ROOT / "Makefile").read_text())[1].split()
    asked_for = {re.match(r"'?([\w.-]+)", package)[1] for package in asked_for} - {project["name"]}

    table = (ROOT / "THIRD_PARTY.md").read_text().partition("## Packages")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| .+ \| .+ \|$", table, re.MULTILINE)[1:]  # without the header
    named = [name for row in rows for name in row.split(", ")]
    assert sorted(named) == sorted(asked_for)
