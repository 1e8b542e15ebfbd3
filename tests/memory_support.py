"""Models, their optimizers, and what several tests of memory count or write."""

import json
import struct

import torch
from torch import nn

import fused8

PEER_SHAPES = ((100, 100), (64, 256), (77, 100), (4096,), (50,))  # 7,700 elements: 256 does not divide them


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


def frozen_half():
    model = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 100))
    model[0].requires_grad_(False)
    return model


def parameters_of(dtype):
    return [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in PEER_SHAPES]


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
