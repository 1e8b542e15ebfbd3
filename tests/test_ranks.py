"""What each rank of a cluster needs by fused8.estimate_memory, and docs/cluster.md, which shows it."""

import json
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import fused8

from .memory_support import frozen_half


def test_ranks_by_hand():
    """Seven rows on 3 ranks are 3, 3 and 1; two rows are 1, 1 and none."""
    estimate = fused8.estimate_memory([(7, 1000), (2, 10)], world_size=3)
    ranks = estimate.per_rank
    assert ranks.world_size == 3
    assert ranks.weights == ranks.gradients
    assert (ranks.weights.largest, ranks.weights.mean) == (4 * 3010, 4 * 7020 / 3)
    a_row = 2 * 1000 + 8 * 4  # two codes an element, two scales for each of 4 blocks
    assert ranks.state.largest == 3 * a_row + 8 * 10 + 8
    assert ranks.state.mean == (7 * a_row + 8 * 20 + 3 * 8) / 3  # both step counters are on every rank
    assert ranks.total.largest == 2 * ranks.weights.largest + ranks.state.largest
    adamw = ranks.optimizers["torch AdamW, FP32 state"]
    assert (adamw.state.largest, adamw.state.mean) == (8 * 3010 + 8, (8 * 7020 + 3 * 8) / 3)
    assert ranks.optimizers["bitsandbytes AdamW8bit"] is None  # it refuses DTensors


def test_what_is_kept_in_8_bits_on_ranks_follows_from_the_whole_shape():
    """A shard of 512 elements of a parameter of 4096 is in 8 bits; a long vector is not, as shards would cut blocks."""
    state = fused8.estimate_memory([(64, 64)], world_size=8).per_rank.state
    assert state.largest == state.mean == 8 * (2 * 64 + 8) + 4
    alone = fused8.estimate_memory([(1 << 20,)], world_size=1)
    assert (alone.state_32bit, alone.per_rank.state.largest) == (0, 8 * (1 << 20) + 4)


def test_the_largest_rank_need_not_be_the_first():
    """torchao keeps 8 bits where a shard has 4096 elements and 256 divides them: the last, smaller shard is in FP32."""
    torchao = fused8.estimate_memory([(33, 255 * 256)], world_size=2).per_rank.optimizers["torchao AdamW8bit"]
    assert torchao.state.largest == 2 * (17 * 255 * 256 + 4 * 17 * 255 + 1024) + 4
    torchao = fused8.estimate_memory([(33, 255)], world_size=2).per_rank.optimizers["torchao AdamW8bit"]
    assert torchao.state.largest == 8 * 17 * 255 + 4
    torchao = fused8.estimate_memory([(320, 16), (512, 255)], world_size=256).per_rank.optimizers["torchao AdamW8bit"]
    assert torchao.state.mean < torchao.state.largest


def test_whole_on_every_rank():
    """Running statistics are buffers, and FSDP2 shards no scalar."""
    ranks = fused8.estimate_memory(nn.BatchNorm1d(100).state_dict(), world_size=4).per_rank
    assert ranks.weights.largest == 2 * 4 * 25 + 2 * 4 * 100 + 8
    assert ranks.gradients.largest == 2 * 4 * 25
    assert fused8.estimate_memory([()], world_size=4).per_rank.weights.largest == 4


def test_ranks_of_a_frozen_half_and_of_groups():
    model = frozen_half()
    ranks = fused8.estimate_memory(model, world_size=2).per_rank
    assert ranks.weights.largest == 4 * 2 * 50 * 101 and ranks.gradients.largest == 4 * 50 * 101
    groups = [{"params": [model[1].weight], "state_bits": 32}, {"params": [model[0].weight]}]
    ranks = fused8.estimate_memory(groups, world_size=2).per_rank
    assert ranks.state.largest == 8 * 50 * 100 + 4
    ranks = fused8.estimate_memory([(100, 100)], dtype=torch.bfloat16, master_bits=24, world_size=2).per_rank
    assert ranks.state.largest == 50 * (3 * 100 + 8) + 4


@pytest.mark.parametrize("world_size", [0, -2, 2.5, "2"])
def test_world_sizes_that_are_none(world_size):
    with pytest.raises(ValueError, match="world_size"):
        fused8.estimate_memory([(3, 4)], world_size=world_size)


def test_ranks_as_text_and_json():
    estimate = fused8.estimate_memory([(1000, 1000)], world_size=8)
    assert "Each of 8 ranks under FSDP2" in str(estimate) and "500,000" in str(estimate)
    found = json.loads(json.dumps(estimate.to_dict()))["per_rank"]
    assert found["optimizers"]["fused8"]["state"]["largest"] == estimate.per_rank.state.largest
    assert fused8.estimate_memory([(1000, 1000)]).to_dict()["per_rank"] is None


# -- docs/cluster.md --------------------------------------------------------------------------------------------------

DOCS = Path(__file__).parent.parent / "docs"


def llama_shapes(config):
    width, middle, vocabulary = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    keys = width // config["num_attention_heads"] * config["num_key_value_heads"]
    attention = [(width, width), (keys, width), (keys, width), (width, width)]
    layer = [*attention, (middle, width), (middle, width), (width, middle), (width,), (width,)]
    return [(vocabulary, width), *layer * config["num_hidden_layers"], (width,), (vocabulary, width)]


def llama_config(size):
    return json.loads((DOCS / f"llama-3.1-{size.lower()}.json").read_text())


def test_the_tables_of_the_cluster_page_are_what_the_estimate_gives():
    text = (DOCS / "cluster.md").read_text()
    rows = re.findall(r"^\| (8B|70B) \| (\d+) \| (fp32|bf16) \| (.*) \|$", text, re.M)
    assert len(rows) == 8 + 4
    parts = [(None, "torch AdamW, FP32 state")] * 8 + [(32, "torch AdamW, FP32 state and master weights")] * 4
    for (size, ranks, dtype, numbers), (master_bits, name) in zip(rows, parts, strict=True):
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
        shapes = llama_shapes(llama_config(size))
        found = fused8.estimate_memory(shapes, dtype=dtype, world_size=int(ranks), master_bits=master_bits).per_rank
        adamw = found.optimizers[name]
        shares = (found.weights, found.gradients, adamw.state, found.state, adamw.total, found.total)
        assert numbers == " | ".join(f"{share.largest / 2**30:.2f}" for share in shares)
    shapes = llama_shapes(llama_config("8B"))
    printed = str(fused8.estimate_memory(shapes, dtype=torch.bfloat16, world_size=8).per_rank.table())
    assert printed in text


@pytest.mark.parametrize("size, parameters", [("8B", 8_030_261_248), ("70B", 70_553_706_496)])
def test_llama_from_its_configuration(size, parameters):
    shapes = fused8.estimate_memory(llama_shapes(llama_config(size)), dtype=torch.bfloat16, world_size=64)
    assert shapes.parameters == parameters
    pytest.importorskip("transformers")
    assert fused8.estimate_memory(DOCS / f"llama-3.1-{size.lower()}.json", world_size=64) == shapes


def test_links_of_the_cluster_page():
    for link in re.findall(r"\]\(([^)#]+)\)", (DOCS / "cluster.md").read_text()):
        assert (DOCS / link).exists(), link
