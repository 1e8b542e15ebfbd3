"""Sharded and replicated training with real processes (gloo). `pytest -m distributed` runs these alone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.distributed

WORKER = Path(__file__).with_name("distributed_worker.py")
SECONDS = 60  # of real work; a rank that hangs prints its stack after 50


def launch(ranks, scenario, folder, expect_failure=False):
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)),
            *(str(WORKER), scenario, str(folder)),
        ],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=2 * SECONDS,
    )
    assert (done.returncode != 0) is expect_failure, done.stdout[-5000:]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_fsdp2_gives_the_bits_of_one_process(ranks, tmp_path):
    launch(ranks, "same_bits", tmp_path)


@pytest.mark.parametrize(
    "scenario, ranks",
    [
        ("same_bits_2d", 4),
        ("tensor_parallel", 2),
        ("full_state", 2),
        ("data_parallel", 2),
        ("zero_redundancy", 2),
        ("fsdp1", 2),
        ("offending_placements", 2),
    ],
)
def test_scenario(scenario, ranks, tmp_path):
    launch(ranks, scenario, tmp_path)


def test_checkpoints_reshard(tmp_path):
    launch(4, "save", tmp_path)
    for ranks in (1, 2, 3, 4):
        launch(ranks, "load", tmp_path)


def test_a_rank_that_dies_while_saving_leaves_the_former_checkpoint(tmp_path):
    launch(2, "save", tmp_path)
    launch(2, "interrupted_save", tmp_path, expect_failure=True)
    launch(2, "load", tmp_path)
