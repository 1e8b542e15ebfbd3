"""fused8.estimate_memory and fused8.memory_report: exact, and the same."""

import json
import os
import re
import struct
from pathlib import Path

import pytest
import torch
from torch import nn

import fused8
from fused8.memory import checkpoint_reports, load_file, safetensors_header


def counted(optimizer):
    """The loop with which courses count an optimizer's memory."""
    return sum(
        tensor.numel() * tensor.element_size()
        for state in optimizer.state.values()
        for tensor in state.values()
        if isinstance(tensor, torch.Tensor)
    )


def step(model_or_params, make=fused8.AdamW8bit, **options):
    """An optimizer after a step, which allocates the state."""
    params = model_or_params
    if isinstance(params, nn.Module):
        params = fused8.param_groups(params) if make is fused8.AdamW8bit else list(params.parameters())
    optimizer = make(params, **options)
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.zeros_like(p)
    optimizer.step()
    return optimizer


class TinyGPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(300, 96)
        layer = nn.TransformerEncoderLayer(96, 4, 200, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(96, 300, bias=False)
        self.head.weight = self.embedding.weight


def convnet():
    return nn.Sequential(nn.Conv2d(3, 40, 5), nn.BatchNorm2d(40), nn.Conv2d(40, 70, 3, groups=2), nn.Linear(70, 10))


def short_rows():
    """Rows of 16, of 7 (too short for 8 bits), of 257; a long vector; a scalar; an empty tensor."""
    model = nn.Module()
    shapes = ((600, 16), (900, 7), (20, 257), (1 << 20,), (), (0, 4))
    for i, shape in enumerate(shapes):
        setattr(model, f"p{i}", nn.Parameter(torch.zeros(shape)))
    return model


def frozen_half():
    model = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 100))
    model[0].requires_grad_(False)
    return model


ARCHITECTURES = {
    "mlp": (lambda: nn.Sequential(nn.Linear(300, 64), nn.LayerNorm(64), nn.Linear(64, 90)), {}),
    "convnet, block 64": (convnet, dict(block_size=64)),
    "tiny GPT, tied": (TinyGPT, {}),
    "short rows, dynamic": (short_rows, dict(codec="dynamic")),
    "amsgrad, bf16": (lambda: TinyGPT().bfloat16(), dict(amsgrad=True, codec="e4m3", block_size=128)),
    "frozen half, all in 8 bits": (frozen_half, dict(min_8bit_size=0)),
}


@pytest.mark.parametrize("build, options", ARCHITECTURES.values(), ids=ARCHITECTURES)
def test_estimate_and_report_agree_to_the_byte(build, options):
    model = build()
    optimizer = step(model, **options)
    report = fused8.memory_report(optimizer)
    with torch.device("meta"):
        on_meta = build()
    trained = [p for p in model.parameters() if p.requires_grad]
    for source in (model, on_meta, fused8.param_groups(model)):
        estimate = fused8.estimate_memory(source, **options)
        assert estimate.state == report.state == counted(optimizer)
        assert estimate.by_dtype == report.by_dtype
        assert estimate.parameters == report.parameters == sum(p.numel() for p in trained)
        assert estimate.gradients == report.gradients == sum(p.numel() * p.element_size() for p in trained)
    estimate = fused8.estimate_memory(model, **options)
    assert estimate.weights == sum(p.numel() * p.element_size() for p in model.parameters())
    assert estimate.frozen == sum(p.numel() for p in model.parameters()) - estimate.parameters
    assert estimate.total == estimate.weights + estimate.gradients + estimate.state
    codes = [t for state in optimizer.state.values() for t in state.values() if t.element_size() == 1]
    scales = [t for state in optimizer.state.values() for name, t in state.items() if name.endswith("_scale")]
    assert estimate.codes == sum(t.numel() for t in codes)
    assert estimate.scales == sum(t.numel() * 4 for t in scales)
    assert estimate.steps == 4 * len(optimizer.state)


def test_groups_with_options_of_their_own():
    model = TinyGPT()
    groups = fused8.param_groups(model, keep_32bit=nn.Embedding)
    estimate = fused8.estimate_memory(groups, codec="dynamic")
    optimizer = fused8.AdamW8bit(fused8.param_groups(model, keep_32bit=nn.Embedding), codec="dynamic")
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert estimate.state == counted(optimizer)
    assert estimate.state_32bit >= 8 * 300 * 96
    assert [set(group) for group in groups] == [{"params", "param_names", "weight_decay"}] * 2 + [
        {"params", "param_names", "weight_decay", "state_bits"}
    ], "the groups were changed"


def test_what_a_block_costs():
    estimate = fused8.estimate_memory([(64, 256), (10,)])
    assert (estimate.codes, estimate.scales, estimate.state_32bit, estimate.steps) == (2 * 64 * 256, 2 * 64 * 4, 80, 8)
    assert estimate.weights == estimate.gradients == 4 * (64 * 256 + 10)


def test_every_form_of_shapes():
    model = nn.Linear(80, 60)
    expected = fused8.estimate_memory(model)
    forms = {
        "shapes": [(60, 80), (60,)],
        "torch.Size": (p.shape for p in model.parameters()),
        "named shapes": [("weight", (60, 80)), ("bias", [60])],
        "dict of shapes": {"weight": (60, 80), "bias": (60,)},
        "tensors": list(model.parameters()),
        "named tensors": model.named_parameters(),
        "state dict": model.state_dict(),
    }
    for what, source in forms.items():
        assert fused8.estimate_memory(source) == expected, what


def test_tensors_that_share_memory_count_once():
    model = TinyGPT()
    state_dict = model.state_dict()
    assert state_dict["head.weight"] is not state_dict["embedding.weight"]
    assert fused8.estimate_memory(state_dict) == fused8.estimate_memory(model)


def test_statistics_and_integers_are_weights_only():
    estimate = fused8.estimate_memory(convnet().state_dict())
    assert estimate.state == fused8.estimate_memory(convnet()).state
    assert estimate.frozen == 40 + 40 + 1  # running_mean, running_var, num_batches_tracked
    eight_bits = {"w": torch.zeros(64, 64, dtype=torch.float8_e4m3fn), "v": torch.zeros(8)}
    assert fused8.estimate_memory(eight_bits).parameters == 8


def test_other_dtypes_of_weights_and_gradients():
    shapes = [(100, 100), (100,)]
    n = 10100
    estimate = fused8.estimate_memory(shapes, dtype=torch.bfloat16)
    assert (estimate.weights, estimate.gradients) == (2 * n, 2 * n)
    assert estimate.state == fused8.estimate_memory(shapes).state
    estimate = fused8.estimate_memory(nn.Linear(100, 100), dtype=torch.bfloat16, grad_dtype=torch.float32)
    assert (estimate.weights, estimate.gradients) == (2 * n, 4 * n)


@pytest.mark.parametrize(
    "source, options, error, message",
    [
        (3, {}, TypeError, "got int"),
        ((3, 4), {}, TypeError, r"\[\(3, 4\)\]"),
        ([(3, -1)], {}, ValueError, "whole numbers"),
        ([(3.0, 1)], {}, ValueError, "whole numbers"),
        ([(3, 4)], dict(codec="int8"), ValueError, "codec"),
        ([(3, 4)], dict(block_size=100), ValueError, "block_size"),
        ([(3, 4)], dict(optim_bits=8), TypeError, "optim_bits"),
        ("nowhere.safetensors", {}, FileNotFoundError, "nowhere"),
    ],
)
def test_what_cannot_be_estimated(source, options, error, message):
    with pytest.raises(error, match=message):
        fused8.estimate_memory(source, **options)


# -- the ranks of a cluster -------------------------------------------------------------------------------------------


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


def test_seven_bytes_per_parameter_where_mixed_precision_takes_sixteen():
    """BF16 weight 2, correction 1, moments 2, gradient 2; usually weight 2, FP32 copy 4, moments 8, gradient 2."""
    model = torch.nn.Linear(4096, 512, bias=False, dtype=torch.bfloat16)
    optimizer = step(model, master_bits=24)
    measured, estimate = fused8.memory_report(optimizer), fused8.estimate_memory(model, master_bits=24)
    scales_and_step = 2 * 4 / 256
    assert (measured.weights + measured.gradients + measured.state) / measured.parameters == pytest.approx(
        7 + scales_and_step, abs=1e-5
    )
    row = next(row for row in measured.tables()[0].rows if row[0] == "weights, gradients and state")
    assert row[-1] == "7.031"
    rows = {row[0]: row for row in estimate.tables()[1].rows}
    assert rows["fused8"][-1] == "7.031"
    assert rows["torch AdamW, FP32 state and master weights"][-1] == "16.000"
    optimizer.zero_grad()
    assert next(row for row in fused8.memory_report(optimizer).tables()[0].rows if "and state" in row[0])[-1] == "5.031"


def test_master_bits_are_estimated_right():
    model = TinyGPT().bfloat16()
    optimizer = step(model, master_bits=32)
    estimate = fused8.estimate_memory(model, master_bits=32)
    assert estimate.master_weights == 2 * estimate.parameters
    assert estimate.state == fused8.memory_report(optimizer).state


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


# -- other optimizers -------------------------------------------------------------------------------------------------

PEER_SHAPES = ((100, 100), (64, 256), (77, 100), (4096,), (50,))  # 7,700 elements: 256 does not divide them


def parameters_of(dtype):
    return [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in PEER_SHAPES]


@pytest.mark.parametrize("amsgrad", [False, True])
def test_torch_adamw_is_estimated_right(amsgrad):
    name = "torch AdamW, FP32 state"
    optimizer = step(parameters_of(torch.float32), torch.optim.AdamW, amsgrad=amsgrad)
    peers = fused8.estimate_memory(PEER_SHAPES, amsgrad=amsgrad).peers
    assert peers[name] == fused8.memory_report(optimizer).state == counted(optimizer)
    peers = fused8.estimate_memory(PEER_SHAPES, amsgrad=amsgrad, dtype=torch.bfloat16).peers
    assert peers[name] == counted(optimizer)
    elements = sum(p.numel() for p in parameters_of(torch.float32))
    assert peers["torch AdamW, FP32 state and master weights"] == counted(optimizer) + 4 * elements
    optimizer = step(parameters_of(torch.bfloat16), torch.optim.AdamW, amsgrad=amsgrad)
    assert peers["torch AdamW, state in the weights' dtype"] == counted(optimizer)


def test_bitsandbytes_is_estimated_right():
    bitsandbytes = pytest.importorskip("bitsandbytes")
    optimizer = step(parameters_of(torch.float32), bitsandbytes.optim.AdamW8bit)
    report = fused8.memory_report(optimizer)
    assert fused8.estimate_memory(PEER_SHAPES).peers["bitsandbytes AdamW8bit"] == report.state
    assert report.by_name["qmap1"] == 1024  # one map for all parameters, which the counting loop counts for each
    assert fused8.estimate_memory(PEER_SHAPES, amsgrad=True).peers["bitsandbytes AdamW8bit"] is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_torchao_is_estimated_right(dtype, amsgrad, monkeypatch):
    pytest.importorskip("torchao")
    from torchao.optim import AdamW8bit, adam

    monkeypatch.setattr(adam, "single_param_adam", lambda *args: None)  # allocation is enough: no compilation
    monkeypatch.setattr(torch, "compile", lambda function, **kwargs: function)
    optimizer = step(parameters_of(dtype), AdamW8bit, amsgrad=amsgrad)
    estimate = fused8.estimate_memory(PEER_SHAPES, dtype=dtype, amsgrad=amsgrad)
    assert estimate.peers["torchao AdamW8bit"] == fused8.memory_report(optimizer).state


def test_flashoptim_by_hand():
    """It runs on CUDA only: 100 elements are 4 groups of 32; two codes and two float16 scales, and an int64 step."""
    peers = fused8.estimate_memory([(100,)]).peers
    assert peers["FlashAdamW"] == 2 * 100 + 2 * 4 * 2 + 8
    peers = fused8.estimate_memory([(100,)], dtype=torch.bfloat16).peers
    assert peers["FlashAdamW, with 24-bit master weights"] == 3 * 100 + 2 * 4 * 2 + 8


# -- DistilBERT -------------------------------------------------------------------------------------------------------


def distilbert_config():
    transformers = pytest.importorskip("transformers")
    # distilbert-base-cased
    return transformers.DistilBertConfig(vocab_size=28996, num_labels=2)


def test_distilbert_without_transformers():
    """The shapes of DistilBertForSequenceClassification with 2 labels: what 8-bit state saves, in round numbers."""
    estimate = fused8.estimate_memory(distilbert_shapes())
    assert estimate.parameters == 65_783_042
    assert 2 * estimate.parameters // 2**20 == 125
    assert estimate.peers["torch AdamW, FP32 state"] / 2**20 == pytest.approx(501.9, abs=0.05)
    assert estimate.state == 134_002_704
    assert estimate.state < 128 * 2**20


def distilbert_shapes():
    shapes = [(28996, 768), (512, 768), (768,), (768,)]
    for _ in range(6):
        shapes += [(768, 768), (768,)] * 4 + [(768,)] * 2  # q, k, v, out; norm
        shapes += [(3072, 768), (3072,), (768, 3072), (768,), (768,), (768,)]
    return [*shapes, (768, 768), (768,), (2, 768), (2,)]


@pytest.mark.parametrize("architecture", ["DistilBertForSequenceClassification", "AutoModelForSequenceClassification"])
def test_distilbert_from_its_configuration(architecture):
    estimate = fused8.estimate_memory(distilbert_config(), architecture=architecture)
    assert estimate == fused8.estimate_memory(distilbert_shapes())


def test_distilbert_measured():
    """The real state: this takes 0.7 GB for a moment."""
    optimizer = step([nn.Parameter(torch.zeros(shape)) for shape in distilbert_shapes()])
    report = fused8.memory_report(optimizer)
    assert report.parameters == 65_783_042
    assert report.state == counted(optimizer) == fused8.estimate_memory(distilbert_shapes()).state
    assert report.largest[0].shape == (28996, 768)


def test_configuration_decides_architecture_and_dtype(tmp_path):
    transformers = pytest.importorskip("transformers")
    small = dict(vocab_size=50, dim=8, hidden_dim=16, n_layers=1, n_heads=2)
    config = transformers.DistilBertConfig(**small, architectures=["DistilBertForMaskedLM"])
    with torch.device("meta"):
        model = transformers.DistilBertForMaskedLM(config)
    expected = fused8.estimate_memory(model)
    assert fused8.estimate_memory(config) == expected  # embedding and head are tied
    config.save_pretrained(tmp_path)
    assert fused8.estimate_memory(tmp_path) == fused8.estimate_memory(tmp_path / "config.json") == expected
    bare = transformers.DistilBertConfig(**small, dtype="bfloat16")
    assert fused8.estimate_memory(bare).weights < expected.weights / 2
    with pytest.raises(ValueError, match="no model class 'Nothing'"):
        fused8.estimate_memory(config, architecture="Nothing")


def test_a_configuration_needs_transformers(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text('{"model_type": "distilbert"}')
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(ModuleNotFoundError, match=r"fused8\[hf\]"):
        fused8.estimate_memory(tmp_path)


# -- files ------------------------------------------------------------------------------------------------------------


def write_safetensors(path, tensors, metadata=None):
    """By the format's description, so that the tests need no package."""
    names = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int64: "I64", torch.int32: "I32"}
    names |= {torch.int8: "I8", torch.uint8: "U8"}
    header, data = {} if metadata is None else {"__metadata__": metadata}, b""
    for name, tensor in tensors.items():
        raw = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def test_safetensors_file(tmp_path):
    tensors = convnet().bfloat16().state_dict()
    write_safetensors(tmp_path / "model.safetensors", tensors, {"format": "pt"})
    expected = fused8.estimate_memory(tensors)
    for path in (tmp_path, tmp_path / "model.safetensors", str(tmp_path / "model.safetensors")):
        assert fused8.estimate_memory(path) == expected


def test_safetensors_header_is_what_safetensors_writes(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    tensors = convnet().state_dict()
    safetensors.save_file(tensors, tmp_path / "model.safetensors")
    stored, _ = safetensors_header(tmp_path / "model.safetensors")
    found = {tensor.name: (tensor.dtype, tensor.shape) for tensor in stored}
    assert found == {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


def test_safetensors_weights_are_not_read(tmp_path):
    """A hole of 64 GB, which no one could read."""
    path = tmp_path / "model.safetensors"
    header = json.dumps({"w": {"dtype": "F32", "shape": [1 << 17, 1 << 17], "data_offsets": [0, 1 << 36]}}).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + (1 << 36))
    assert fused8.estimate_memory(path).weights == 1 << 36


def test_index_of_shards(tmp_path):
    tensors = TinyGPT().state_dict()
    names = list(tensors)
    shards = {"a.safetensors": names[:3], "b.safetensors": names[3:]}
    for shard, own in shards.items():
        write_safetensors(tmp_path / shard, {name: tensors[name].clone() for name in own})
    index = {"weight_map": {name: shard for shard, own in shards.items() for name in own}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    separate = {name: tensor.clone() for name, tensor in tensors.items()}
    assert fused8.estimate_memory(tmp_path) == fused8.estimate_memory(separate)

    index["weight_map"]["other.weight"] = "a.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"a.safetensors lacks other.weight"):
        fused8.estimate_memory(tmp_path)
    for shard in ("c.safetensors", "../a.safetensors"):
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": shard}}))
        with pytest.raises(FileNotFoundError, match="not beside it"):
            fused8.estimate_memory(tmp_path)


def damaged_header(entry):
    text = json.dumps({"w": entry}).encode()
    return struct.pack("<Q", len(text)) + text + bytes(16)


GOOD = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "truncated"),
        (b"\x01\x02", "truncated"),
        (b"\xff" * 64, "no safetensors file"),
        (damaged_header(GOOD)[:40], "truncated within its header"),
        (damaged_header(GOOD)[:-1], "truncated: "),
        (struct.pack("<Q", 4) + b"{]}x" + bytes(16), "damaged"),
        (struct.pack("<Q", 2) + b"[]" + bytes(16), "no object"),
        (damaged_header({"dtype": "F32", "shape": [2, 2]}), "'w' is damaged"),
        (damaged_header(GOOD | {"shape": [2, 3]}), "'w' is damaged"),
        (damaged_header(GOOD | {"shape": [-2, -2]}), "'w' is damaged"),
        (damaged_header(GOOD | {"shape": "22"}), "'w' is damaged"),
        (damaged_header(GOOD | {"data_offsets": [16, 0]}), "'w' is damaged"),
        (damaged_header("w"), "'w' is damaged"),
    ],
)
def test_damaged_safetensors_files(tmp_path, content, message):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        fused8.estimate_memory(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("nesting", [None, "model", "state_dict", "model_state_dict"])
def test_saved_state_dict(tmp_path, nesting):
    state_dict = TinyGPT().state_dict()
    path = tmp_path / "model.pt"
    torch.save(state_dict if nesting is None else {nesting: state_dict, "epoch": 3}, path)
    assert fused8.estimate_memory(path) == fused8.estimate_memory(TinyGPT())
    path.rename(tmp_path / "pytorch_model.bin")
    assert fused8.estimate_memory(tmp_path) == fused8.estimate_memory(TinyGPT())


def test_state_dict_of_the_old_format(tmp_path):
    torch.save(TinyGPT().state_dict(), tmp_path / "model.pt", _use_new_zipfile_serialization=False)
    assert fused8.estimate_memory(tmp_path / "model.pt") == fused8.estimate_memory(TinyGPT())


class Code:
    def __reduce__(self):
        return os.mkdir, ("executed",)


def test_code_in_files_is_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"state": {}, "param_groups": [], "more": Code()}, "evil.pt")
    for read in (fused8.estimate_memory, checkpoint_reports):
        with pytest.raises(ValueError, match=r"mkdir.* code in files is not run"):
            read(tmp_path / "evil.pt")
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("content", [b"", b"\x80\x02hello", b"PK\x03\x04", b"text"])
def test_damaged_files(tmp_path, content):
    path = tmp_path / "model.pt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="damaged"):
        load_file(path)
    torch.save({"w": torch.zeros(1000)}, path)
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(ValueError, match="damaged"):
        load_file(path)


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("index.json", {"weight_map": ["a"]}, "no map"),
        ("config.json", {"hidden": 3}, "neither an index"),
        ("broken.json", None, "damaged"),
    ],
)
def test_json_that_is_no_model(tmp_path, name, content, message):
    (tmp_path / name).write_text("{" if content is None else json.dumps(content))
    with pytest.raises(ValueError, match=message):
        fused8.estimate_memory(tmp_path / name)


def test_paths_without_a_model(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"has none of model\.safetensors"):
        fused8.estimate_memory(tmp_path)
    torch.save(step(TinyGPT()).state_dict(), tmp_path / "optimizer.pt")
    with pytest.raises(ValueError, match="`fused8 report`"):
        fused8.estimate_memory(tmp_path / "optimizer.pt")
    torch.save({"epoch": 3}, tmp_path / "other.pt")
    with pytest.raises(ValueError, match="no state dict"):
        fused8.estimate_memory(tmp_path / "other.pt")
    with pytest.raises(ValueError, match="architecture goes with a configuration"):
        fused8.estimate_memory(tmp_path / "other.pt", architecture="BertModel")


# -- the report -------------------------------------------------------------------------------------------------------


def test_report_in_detail():
    model = nn.Sequential(nn.Linear(100, 80), nn.LayerNorm(80))
    optimizer = step(model, lr=3e-4, weight_decay=0.1)
    report = fused8.memory_report(optimizer)
    assert report.optimizer == "AdamW8bit" and report.steps == (1, 1)
    assert report.weights == report.gradients == 4 * (8000 + 3 * 80)
    assert report.by_name == {
        "exp_avg": 8000 + 4 * 240,
        "exp_avg_sq": 8000 + 4 * 240,
        "exp_avg_scale": 4 * 80,
        "exp_avg_sq_scale": 4 * 80,
        "step": 16,
    }
    first, second = report.groups
    assert (first.parameters, first.tensors, first.state) == (8000, 1, 16000 + 640 + 4)
    assert (second.parameters, second.tensors, second.state) == (240, 3, 3 * (640 + 4))
    assert first.options == dict(
        state_bits=8, codec="adaptive", block_size=256, amsgrad=False, weight_decay=0.01, lr=3e-4
    )
    assert report.state == first.state + second.state == sum(report.by_dtype.values()) == sum(report.by_name.values())
    assert (report.largest[0].name, report.largest[0].shape) == ("0.weight", (80, 100))
    json.dumps(report.to_dict())


def test_report_before_the_first_step():
    optimizer = fused8.AdamW8bit(fused8.param_groups(nn.Linear(100, 80)))
    report = fused8.memory_report(optimizer)
    assert (report.state, report.parameters, report.gradients, report.steps) == (0, 0, 0, None)
    assert [group.without_state for group in report.groups] == [1, 1]
    assert "have no state" in str(report)


def test_report_of_a_group_whose_names_are_of_other_parameters():
    """DeepSpeed puts one flat parameter in the place of a group's many, and leaves their names."""
    flat = nn.Parameter(torch.zeros(100))
    flat.grad = torch.zeros_like(flat)
    optimizer = fused8.AdamW8bit(fused8.param_groups(nn.Linear(9, 9)))
    optimizer.param_groups[0]["param_names"] = ["a", "b"]
    optimizer.param_groups[0]["params"] = [flat]
    optimizer.step()
    report = fused8.memory_report(optimizer)
    assert (report.state, report.largest[0].name) == (804, "group 0, parameter 0")


def test_report_of_parameters_that_got_no_gradient():
    p, q = nn.Parameter(torch.zeros(64, 64)), nn.Parameter(torch.zeros(3))
    p.grad = torch.zeros_like(p)
    optimizer = fused8.AdamW8bit([p, q])
    optimizer.step()
    report = fused8.memory_report(optimizer)
    assert (report.groups[0].tensors, report.groups[0].without_state, report.parameters) == (1, 1, 4096)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.Adafactor(p),
        lambda p: torch.optim.RAdam(p),
        lambda p: torch.optim.Adam(p, fused=True),
    ],
    ids=["SGD", "Adafactor", "RAdam", "fused Adam"],
)
def test_report_of_torch_optimizers(make):
    optimizer = step(parameters_of(torch.float32), make)
    assert fused8.memory_report(optimizer).state == counted(optimizer) > 0


def test_report_of_nested_and_unowned_state():
    p = nn.Parameter(torch.zeros(10))
    optimizer = torch.optim.LBFGS([p])
    optimizer.step(lambda: (p**2 + p).sum().backward() or (p**2 + p).sum())
    optimizer.state["shared"] = {"buffers": [torch.zeros(7), (torch.zeros(3, dtype=torch.int8), "text")]}
    report = fused8.memory_report(optimizer)
    assert report.groups[-1].number is None
    assert report.groups[-1].state == 7 * 4 + 3
    assert report.by_name["buffers"] == 31 and report.by_name["old_dirs"] >= 40


def test_shared_tensors_count_once():
    p, q = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([p, q], lr=0.1)
    shared = torch.zeros(100)
    optimizer.state[p]["map"] = optimizer.state[q]["map"] = shared
    assert fused8.memory_report(optimizer).state == 400


def test_tensor_subclasses_count_as_what_they_consist_of():
    from torch.testing._internal.two_tensor import TwoTensor

    p = nn.Parameter(torch.zeros(8))
    optimizer = torch.optim.SGD([p], lr=0.1)
    optimizer.state[p]["pair"] = TwoTensor(torch.zeros(8), torch.zeros(8))
    assert fused8.memory_report(optimizer).by_dtype == {"float32": 64}


def test_tensors_in_objects_are_counted():
    class Quantized:
        def __init__(self):
            self.codes, self.scales, self.block = torch.zeros(32, dtype=torch.int8), torch.zeros(1), 32

    p = nn.Parameter(torch.zeros(32))
    optimizer = torch.optim.SGD([p], lr=0.1)
    optimizer.state[p]["exp_avg"] = Quantized()
    assert fused8.memory_report(optimizer).by_name == {"exp_avg": 36}


def test_text_of_both():
    model = nn.Sequential(nn.Linear(1000, 1000), nn.LayerNorm(1000))
    text = str(fused8.estimate_memory(model))
    assert "1,003,000 parameters" in text and "bitsandbytes" in text and "7.65" in text  # MiB of torch's AdamW
    text = str(fused8.memory_report(step(model)))
    assert "after 1 steps" in text and "[1000, 1000]" in text
    assert all(line == line.rstrip() for line in text.splitlines())


# -- optimizer states in files ----------------------------------------------------------------------------------------


def wrapped(state_dict):
    return {
        "": state_dict,
        "optimizer": {"optimizer": state_dict, "epoch": 3, "model": {"w": torch.zeros(3)}},
        "optimizer_states[0]": {"optimizer_states": [state_dict], "lr_schedulers": [{"last_epoch": 3}]},
        "a.b[1].c": {"a": {"b": [0, {"c": state_dict}]}},
    }


@pytest.mark.parametrize("place", wrapped(None))
def test_states_are_found_in_a_file(tmp_path, place):
    optimizer = step(TinyGPT())
    torch.save(wrapped(optimizer.state_dict())[place], tmp_path / "checkpoint.pt")
    report = checkpoint_reports(tmp_path / "checkpoint.pt")[place]
    measured = fused8.memory_report(optimizer)
    assert (report.state, report.by_name, report.by_dtype) == (measured.state, measured.by_name, measured.by_dtype)
    assert (report.optimizer, report.parameters, report.steps) == ("fused8", measured.parameters, (1, 1))
    assert [p.name for p in report.largest] == [p.name for p in measured.largest]
    assert report.weights is None and report.gradients is None
    str(report)


@pytest.mark.parametrize(
    "make, kind", [(torch.optim.AdamW, "Adam of torch or alike"), (torch.optim.Adagrad, "optimizer")]
)
def test_states_of_others_in_a_file(tmp_path, make, kind):
    optimizer = step(parameters_of(torch.float32), make)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    report = checkpoint_reports(tmp_path / "optimizer.pt")[""]
    assert (report.optimizer, report.state) == (kind, counted(optimizer))


def test_bitsandbytes_state_in_a_file(tmp_path):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    optimizer = step(parameters_of(torch.float32), bitsandbytes.optim.Adam8bit)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    report = checkpoint_reports(tmp_path / "optimizer.pt")[""]
    assert report.optimizer == "bitsandbytes" and report.steps == (1, 1)
    assert report.state == fused8.memory_report(optimizer).state
    assert report.parameters == sum(p.numel() for p in parameters_of(torch.float32))


def test_safetensors_state(tmp_path):
    optimizer = step(TinyGPT())
    saved = optimizer.state_dict()
    tensors = {f"state.{key}.{name}": t for key, own in saved["state"].items() for name, t in own.items()}
    path = tmp_path / "optimizer.safetensors"
    write_safetensors(path, tensors, {"param_groups": json.dumps(saved["param_groups"])})
    report, measured = checkpoint_reports(path)[""], fused8.memory_report(optimizer)
    assert (report.state, report.by_name, report.by_dtype) == (measured.state, measured.by_name, measured.by_dtype)
    assert (report.optimizer, report.parameters) == ("fused8", measured.parameters)
    assert [group.tensors for group in report.groups] == [group.tensors for group in measured.groups]

    write_safetensors(path, {"weight": torch.zeros(3)}, {"format": "pt"})
    with pytest.raises(ValueError, match="no optimizer state"):
        checkpoint_reports(path)


def test_files_without_an_optimizer_state(tmp_path):
    for name, content in (("model.pt", TinyGPT().state_dict()), ("number.pt", 3)):
        torch.save(content, tmp_path / name)
        with pytest.raises(ValueError, match="no optimizer state"):
            checkpoint_reports(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        checkpoint_reports(tmp_path / "nowhere.pt")
    with pytest.raises(IsADirectoryError, match=r"optimizer\.pt"):
        checkpoint_reports(tmp_path)
