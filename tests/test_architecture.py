"""Imports flow down only, so that each part can be read and tested without those above it."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "py" / "fused8"

# Each module may import those after it. A new module takes its place here.
ORDER = (
    "cli",
    "convert_cli",
    "checkpoints",
    "memory",
    "estimate",
    "ranks",
    "peers",
    "models",
    "report",
    "files",
    "tables",
    "sizes",
    "groups",
    "in_backward",
    "optimizer",
    "planner",
    "offload",
    "gradients",
    "master_weights",
    "loading",
    "convert",
    "foreign",
    "sources",
    "options",
    "step_plan",
    "state",
    "sharding",
    "ops",
    "backends",
    "triton_kernels",
    "reference",
    "formats",
    "codecs",
)
# Rather than anything of fused8, these import only torch (and the Triton kernels triton).
LEAVES = {"codecs": {"torch"}, "formats": {"torch"}, "reference": {"torch"}}


def imports(path: Path) -> set[str]:
    """Top-level names of absolute imports, and modules of fused8 as `.name`."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level:
            found |= {"." + (node.module or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    return {"." + name.split(".")[1] if name.startswith("fused8.") else name for name in found}


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("*.py")), ids=lambda path: path.stem)
def test_imports_flow_down(path):
    if path.stem == "__init__":
        return
    below = ORDER[ORDER.index(path.stem) + 1 :]
    for name in imports(path):
        if name.startswith("."):
            assert name[1:] in below, f"{path.stem} imports {name}, which is not below it"


@pytest.mark.parametrize("module, allowed", LEAVES.items())
def test_leaves_import_only_torch(module, allowed):
    third_party = {name.split(".")[0] for name in imports(PACKAGE / f"{module}.py") if not name.startswith(".")}
    assert third_party - {"__future__", "collections", "itertools", "math", "typing"} <= allowed


def test_nothing_in_the_package_imports_tests_benches_or_examples():
    for path in [*PACKAGE.glob("*.py"), *(ROOT / "triton_kernels").glob("*.py")]:
        assert not {name.split(".")[0] for name in imports(path)} & {"tests", "bench", "examples"}, path


def test_only_ops_registers_operators():
    for path in PACKAGE.glob("*.py"):
        assert path.stem == "ops" or "torch.library." not in path.read_text(), path


def test_the_package_imports_without_triton_or_numpy():
    for path in PACKAGE.glob("*.py"):
        tops = {
            alias.name.split(".")[0]
            for node in ast.parse(path.read_text()).body
            if isinstance(node, ast.Import)
            for alias in node.names
        }
        assert not tops & {"triton", "numpy"}, path
