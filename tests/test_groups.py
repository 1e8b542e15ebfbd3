"""fused8.param_groups and fused8.trainer_kwargs."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import fused8


def names(groups):
    """(weight_decay, state_bits) -> names."""
    return {(group["weight_decay"], group.get("state_bits", 8)): group["param_names"] for group in groups}


def decayed(model, **options):
    found = names(fused8.param_groups(model, 0.1, **options))
    return set(found.get((0.1, 8), []))


def parameter(*shape):
    return nn.Parameter(torch.randn(shape))


class LlamaRMSNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = parameter(width)


class Gated(LlamaRMSNorm):
    pass


class PreNormBlock(nn.Module):
    """A name with "norm" in it, but what it holds are other modules, and a scale of its own."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.normal = nn.Linear(8, 8, bias=False)
        self.scale = parameter(1, 8, 1)


class LayerNormLinear(nn.Module):
    """A normalization and a matrix in one, as in TransformerEngine."""

    def __init__(self):
        super().__init__()
        self.layer_norm_weight, self.layer_norm_bias = parameter(8), parameter(8)
        self.weight, self.bias = parameter(4, 8), parameter(4)


class NormalHead(nn.Module):
    """Predicts a normal distribution, and normalizes nothing."""

    def __init__(self):
        super().__init__()
        self.temperature = parameter(1)


class BatchNormalization(nn.Module):
    def __init__(self):
        super().__init__()
        self.gamma, self.beta = parameter(8), parameter(8)


class Everything(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.relative_attention_bias = nn.Embedding(10, 2)  # T5's: a table in a module named like a bias
        self.normalizer = nn.Linear(8, 8)  # a linear layer in a module named like a norm
        self.lstm = nn.LSTM(8, 8)
        self.attention = nn.MultiheadAttention(8, 2, add_bias_kv=True)
        self.gated = Gated(8)
        self.block = PreNormBlock()
        self.fused = LayerNormLinear()
        self.head = NormalHead()
        self.batch = BatchNormalization()
        self.image = nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.InstanceNorm2d(4, affine=True)
        )
        self.plane = nn.LayerNorm((4, 5))  # a 2-D weight
        self.rms = nn.RMSNorm(8)
        self.biases = nn.ParameterList([parameter(3), parameter(3)])
        self.experts = nn.ParameterList([parameter(3), parameter(3)])
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.spectral = nn.utils.parametrizations.orthogonal(nn.Linear(8, 8))
        self.gain = parameter(8)


def test_what_decays_is_told_by_module():
    model = Everything()
    assert decayed(model) == {
        "embedding.weight",
        "relative_attention_bias.weight",
        "normalizer.weight",
        "lstm.weight_ih_l0",
        "lstm.weight_hh_l0",
        "attention.in_proj_weight",
        "attention.out_proj.weight",
        "block.normal.weight",
        "fused.weight",
        "head.temperature",
        "image.0.weight",
        "experts.0",
        "experts.1",
        "normed.parametrizations.weight.original0",
        "normed.parametrizations.weight.original1",
        "spectral.parametrizations.weight.original",
        "gain",
    }


def test_bias_with_parametrization_does_not_decay():
    model = nn.Linear(4, 4)
    nn.utils.parametrize.register_parametrization(model, "bias", nn.Identity())
    assert decayed(model) == {"weight"}


def test_groups_are_in_the_order_of_the_model():
    model = Everything()
    order = [name for name, _ in model.named_parameters()]
    groups = fused8.param_groups(model, 0.1, keep_32bit="lstm")
    assert [(g["weight_decay"], g.get("state_bits")) for g in groups] == [
        (0.1, None),
        (0.0, None),
        (0.1, 32),
        (0.0, 32),
    ]
    for group in groups:
        positions = [order.index(name) for name in group["param_names"]]
        assert positions == sorted(positions)
        assert [id(model.get_parameter(name)) for name in group["param_names"]] == [id(p) for p in group["params"]]
    assert sorted(name for group in groups for name in group["param_names"]) == sorted(order)


def test_empty_groups_are_left_out_and_a_decay_of_zero_changes_no_groups():
    model = nn.Linear(4, 4, bias=False)
    assert len(fused8.param_groups(model)) == 1
    assert fused8.param_groups(model)[0]["weight_decay"] == 0.01
    model = nn.Linear(4, 4)
    assert [g["param_names"] for g in fused8.param_groups(model, 0.0)] == [["weight"], ["bias"]]


def tied():
    model = nn.Module()
    model.embedding = nn.Embedding(10, 4)
    model.head = nn.Linear(4, 10, bias=False)
    model.head.weight = model.embedding.weight
    return model


def test_tied_parameters_are_there_once():
    assert names(fused8.param_groups(tied(), 0.1)) == {(0.1, 8): ["embedding.weight"]}


@pytest.mark.parametrize("selector", ["head", "head.weight", "embedding.weight", nn.Linear, nn.Embedding])
def test_any_name_of_a_tied_parameter_selects_it(selector):
    assert names(fused8.param_groups(tied(), 0.1, keep_32bit=selector)) == {(0.1, 32): ["embedding.weight"]}
    assert names(fused8.param_groups(tied(), 0.1, no_decay=[selector])) == {(0.0, 8): ["embedding.weight"]}


def test_frozen_parameters_are_left_out():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    assert names(fused8.param_groups(model, 0.1)) == {(0.1, 8): ["1.weight"], (0.0, 8): ["1.bias"]}
    with pytest.raises(ValueError, match="requires a gradient"):
        fused8.param_groups(model.requires_grad_(False))


@pytest.mark.parametrize(
    "select",
    [
        lambda model: "0",
        lambda model: model[0],
        lambda model: ["0.weight", "0.bias"],
        lambda model: [model[0].weight, model[0].bias],
        lambda model: {nn.Linear},
        lambda model: (nn.Linear,),
    ],
    ids=["module name", "module", "parameter names", "parameters", "set of types", "tuple of types"],
)
def test_selectors(select):
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    assert names(fused8.param_groups(model, 0.1, keep_32bit=select(model))) == {
        (0.0, 8): ["1.weight", "1.bias"],
        (0.1, 32): ["0.weight"],
        (0.0, 32): ["0.bias"],
    }
    assert decayed(model, no_decay=select(model)) == set()


def test_a_module_list_is_one_selector():
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]), "head": nn.Linear(4, 4)})
    assert decayed(model, no_decay=model["layers"]) == {"head.weight"}


@pytest.mark.parametrize(
    "selector, error, message",
    [
        ("0.wieght", ValueError, "no parameter or module named '0.wieght'; there is 0.weight"),
        (nn.Linear(4, 4), ValueError, "a Linear is given that is not in the model"),
        (torch.zeros(3), ValueError, r"shape \(3,\) is not in the model"),
        (int, TypeError, "takes modules"),
        ([3], TypeError, "takes modules"),
    ],
)
def test_what_selects_nothing_is_an_error(selector, error, message):
    with pytest.raises(error, match=message):
        fused8.param_groups(nn.Sequential(nn.Linear(4, 4)), keep_32bit=selector)


def test_a_class_that_does_not_occur_selects_nothing():
    assert decayed(nn.Sequential(nn.Linear(4, 4)), no_decay=nn.Embedding) == {"0.weight"}


def test_the_optimizer_takes_the_groups():
    model = nn.Sequential(nn.Linear(64, 128), nn.LayerNorm(128), nn.Linear(128, 64))
    optimizer = fused8.AdamW8bit(fused8.param_groups(model, 0.1, keep_32bit="2"), lr=1e-2)
    model(torch.randn(2, 64)).sum().backward()
    optimizer.step()
    dtypes = {name: optimizer.state[p]["exp_avg"].dtype for name, p in model.named_parameters()}
    assert dtypes["0.weight"] == torch.int8 and dtypes["2.weight"] == torch.float32
    saved = optimizer.state_dict()
    assert saved["param_groups"][0]["param_names"] == ["0.weight"]
    optimizer.load_state_dict(saved)
    torch.optim.AdamW(fused8.param_groups(model, 0.1)).step()


def test_decay_reaches_what_it_should_and_nothing_else():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    before = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    fused8.AdamW8bit(fused8.param_groups(model, weight_decay=0.5), lr=0.5).step()
    changed = [not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True)]
    assert changed == [True, False, False, False]


def test_embeddings_need_no_32bit_state():
    """Rows get gradients by Zipf's law. The relative L2 distance of the updates from those of 32-bit state."""

    def error(codec):
        torch.manual_seed(0)
        p, exact = parameter(200, 64), parameter(200, 64)
        optimizers = [
            fused8.AdamW8bit([p], lr=1.0, weight_decay=0.0, codec=codec),
            fused8.AdamW8bit([{"params": [exact], "state_bits": 32}], lr=1.0, weight_decay=0.0),
        ]
        frequency = (20 / torch.arange(1, 201)).unsqueeze(1)
        difference = size = 0.0
        for _ in range(300):
            grad = torch.randn(200, 64) * (torch.rand(200, 1) < frequency)
            for q, optimizer in zip((p, exact), optimizers, strict=True):
                with torch.no_grad():
                    q.zero_()  # so that the parameter is the update
                q.grad = grad.clone()
                optimizer.step()
            difference += (p - exact).square().sum().item()
            size += exact.square().sum().item()
        return (difference / size) ** 0.5

    adaptive, dynamic = error("adaptive"), error("dynamic")
    assert adaptive < 0.02 and adaptive < 0.6 * dynamic  # measured: 0.012 and 0.024


def test_takes_a_module():
    with pytest.raises(TypeError, match="Module"):
        fused8.param_groups([parameter(3)])


# -- the Trainer's arguments ------------------------------------------------------------------------------------------


def arguments(**changes):
    values = dict(learning_rate=3e-4, adam_beta1=0.8, adam_beta2=0.95, adam_epsilon=1e-6, weight_decay=0.2)
    return SimpleNamespace(**values | changes)


def test_trainer_kwargs_passes_on_what_the_trainer_would_drop():
    cls, kwargs = fused8.trainer_kwargs(arguments())
    assert cls is fused8.AdamW8bit
    assert kwargs == {"lr": 3e-4, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.2}
    cls([parameter(3)], **kwargs)


def test_trainer_kwargs_reads_optim_args_and_lets_options_win():
    args = arguments(optim_args="codec=dynamic, block_size=64,amsgrad=True,backend=none,eps=1e-7")
    _, kwargs = fused8.trainer_kwargs(args, block_size=128)
    found = {name: kwargs[name] for name in ("codec", "block_size", "amsgrad", "backend", "eps")}
    assert found == dict(codec="dynamic", block_size=128, amsgrad=True, backend=None, eps=1e-7)
    fused8.AdamW8bit([parameter(3)], **kwargs)


def test_trainer_kwargs_says_what_is_wrong():
    with pytest.raises(TypeError, match="adam_beta1"):
        fused8.trainer_kwargs(SimpleNamespace(learning_rate=1e-3))
    with pytest.raises(ValueError, match="'codec'"):
        fused8.trainer_kwargs(arguments(optim_args="codec"))
    cls, kwargs = fused8.trainer_kwargs(arguments(optim_args="unknown=1"))
    with pytest.raises(TypeError, match="unknown"):
        cls([parameter(3)], **kwargs)


def test_trainer_kwargs_of_real_arguments(tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    args = transformers.TrainingArguments(
        output_dir=str(tmp_path), learning_rate=1e-4, adam_beta2=0.98, weight_decay=0.3, optim_args="block_size=64"
    )
    _, kwargs = fused8.trainer_kwargs(args)
    assert kwargs == {"lr": 1e-4, "betas": (0.9, 0.98), "eps": 1e-8, "weight_decay": 0.3, "block_size": 64}


def test_distilbert_groups():
    transformers = pytest.importorskip("transformers")
    config = transformers.DistilBertConfig(vocab_size=50, dim=8, hidden_dim=16, n_layers=1, n_heads=2, num_labels=2)
    model = transformers.DistilBertForSequenceClassification(config)
    undecayed = set(names(fused8.param_groups(model, 0.1))[0.0, 8])
    expected = {name for name, p in model.named_parameters() if p.ndim == 1}  # its vectors are biases and norms
    assert undecayed == expected
