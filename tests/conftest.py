"""Set before anything imports torch or triton."""

import os

# Triton kernels run in Triton's interpreter: there is no GPU to test on. Tests that compile kernels start a process
# without it.
os.environ["TRITON_INTERPRET"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

from fused8 import backends


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def _threads():
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _compiled_library():
    """Without it the tests of the C++ kernels would silently test the reference against itself."""
    assert backends.load_library() is None, backends.load_library()
