"""Every number through the short cuts of the CPU kernel: codes by one look-up, division by a reciprocal."""

import runpy
import subprocess
from pathlib import Path

import pytest
import setuptools

from .support import ISAS, require_isa

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("isa", ISAS)
def test_every_number_comes_out_as_by_the_plain_way(isa, tmp_path, monkeypatch):
    require_isa(isa, monkeypatch)
    monkeypatch.chdir(ROOT)  # setup.py looks for its sources from there
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    build = runpy.run_path("setup.py")
    flags = [*build["CXX_FLAGS"], "-O2", *build["FLOAT_FLAGS"]]
    own = build["ISA_FLAGS"].get(f"step_{isa}.cpp", [])
    compiler = build["BuildLibraries"].cxx()
    objects = []
    for source, isa_flags in (("tests/cpu_host/numbers.cpp", own), ("csrc/cpu/dynamic_buckets.cpp", [])):
        objects.append(str(tmp_path / Path(source).with_suffix(".o").name))
        subprocess.run([*compiler, *flags, *isa_flags, "-c", source, "-o", objects[-1]], check=True)
    program = tmp_path / "numbers"
    subprocess.run([*compiler, *objects, "-o", program], check=True)
    assert subprocess.run([program], capture_output=True, text=True, timeout=600).stdout == "ok\n"
