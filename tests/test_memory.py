"""fused8.estimate_memory and fused8.memory_report: exact, and the same; what other optimizers take."""

import pytest
import torch
from torch import nn

import fused8

from .memory_support import PEER_SHAPES, TinyGPT, convnet, counted, frozen_half, parameters_of, step


def short_rows():
    """Rows of 16, of 7 (too short for 8 bits), of 257; a long vector; a scalar; an empty tensor."""
    model = nn.Module()
    shapes = ((600, 16), (900, 7), (20, 257), (1 << 20,), (), (0, 4))
    for i, shape in enumerate(shapes):
        setattr(model, f"p{i}", nn.Parameter(torch.zeros(shape)))
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


# -- other optimizers -------------------------------------------------------------------------------------------------


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
