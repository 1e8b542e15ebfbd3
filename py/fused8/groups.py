"""Param groups from a model, and the arguments that the Trainer of transformers takes."""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

from torch import Tensor, nn

from .optimizer import AdamW8bit

Selector: TypeAlias = "str | Tensor | nn.Module | type[nn.Module]"

# All parameters that a module of these classes owns itself are a normalization's, whatever their shape.
NORMALIZATIONS: tuple[type[nn.Module], ...] = (
    nn.LayerNorm,
    nn.RMSNorm,
    nn.GroupNorm,
    nn.modules.batchnorm._NormBase,  # batch and instance norms, also synchronized and lazy ones
)
# A class of another library or of the user: LlamaRMSNorm, T5LayerNorm, BatchNormalization, but not NormalHead.
_NORM_IN_CLASS_NAME = re.compile(r"norm(?!al(?!i[sz]))", re.IGNORECASE)
# These hold parameters for the module above them, whose attribute they stand for.
_CONTAINERS = (nn.ParameterList, nn.ParameterDict, nn.utils.parametrize.ParametrizationList)


def param_groups(
    model: nn.Module,
    weight_decay: float = 1e-2,
    *,
    keep_32bit: Selector | Iterable[Selector] = (),
    no_decay: Selector | Iterable[Selector] = (),
) -> list[dict[str, Any]]:
    """The param groups of a model: weights decay; biases and normalizations do not.

        optimizer = fused8.AdamW8bit(fused8.param_groups(model, weight_decay=0.01), lr=5e-5)

    Every parameter that requires a gradient is in exactly one group, a tied one under the first of its names. What a
    parameter is follows from the module that owns it, never from the name of that module:

    - a bias: the parameter's own name has the word "bias" in it (`bias`, `in_proj_bias`, `bias_hh_l0`). T5's
      `relative_attention_bias.weight` is an embedding table, and decays.
    - a normalization: every parameter that belongs directly to one of torch's normalization layers (layer, RMS, group,
      batch, instance), or to a module whose class, or a base class of it, has "norm" in its name (`LlamaRMSNorm`), and
      there has at most one dimension longer than 1. So the linear layers inside a `PreNormBlock` and the matrix of
      a `LayerNormLinear` decay.

    Everything else decays: matrices, convolutions, embeddings, and vectors that are neither.

    Args:
        model: the model, on any device.
        weight_decay: the decay of what decays; AdamW's default.
        keep_32bit: what is to have 32-bit state (`state_bits: 32`): one or several of a module (all that is in it), a
            parameter, the name of either, or a class of modules (all that is in each of them). With other 8-bit
            optimizers many keep embeddings so. With the default `adaptive` codec none need it: where the rows of an
            embedding get gradients by Zipf's law, the updates lie 1.2 % (L2) from those of 32-bit state, and 2.4 % with
            `dynamic`, the map of bitsandbytes.
        no_decay: what else is not to decay, given in the same way: `no_decay=nn.Embedding`.

    Returns:
        Up to four groups, each in the model's order, empty ones left out: decayed, not decayed, and the same two with
        32-bit state. Which groups there are does not depend on the value of `weight_decay`. Each has `params`,
        `param_names` and `weight_decay`.

    Raises:
        ValueError: a name, a module or a parameter is not in the model, or nothing in it requires a gradient. (A class
            of which the model has no module selects nothing.)
        TypeError: a selector is of another type.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"param_groups takes a torch.nn.Module, got {type(model).__name__}")
    in_32bit = _selected(model, keep_32bit, "keep_32bit")
    undecayed = _selected(model, no_decay, "no_decay") | _biases_and_normalizations(model)
    groups: dict[tuple[bool, bool], dict[str, Any]] = {}
    for in_fp32 in (False, True):
        for decays in (True, False):
            groups[in_fp32, decays] = {
                "params": [],
                "param_names": [],
                "weight_decay": weight_decay if decays else 0.0,
            } | ({"state_bits": 32} if in_fp32 else {})
    for name, p in model.named_parameters():
        if p.requires_grad:
            group = groups[p in in_32bit, p not in undecayed]
            group["params"].append(p)
            group["param_names"].append(name)
    result = [group for group in groups.values() if group["params"]]
    if not result:
        raise ValueError("no parameter of the model requires a gradient")
    return result


def trainer_kwargs(args: Any, **options: Any) -> tuple[type[AdamW8bit], dict[str, Any]]:
    """The `optimizer_cls_and_kwargs` of transformers.Trainer, with the hyperparameters of its arguments.

        Trainer(model, args, optimizer_cls_and_kwargs=fused8.trainer_kwargs(args), ...)

    The Trainer makes the param groups then, and passes nothing of its arguments to an optimizer that it is given in
    this way: learning_rate, adam_beta1, adam_beta2, adam_epsilon and weight_decay are passed on here, and so is what
    `optim_args` holds ("codec=dynamic,block_size=64"). `optim` is not looked at.

    Args:
        args: transformers.TrainingArguments, or anything with the attributes named above.
        options: more options of AdamW8bit; they win over `optim_args`.

    Returns:
        AdamW8bit and its keyword arguments.

    Raises:
        TypeError: `args` lacks an attribute.
        ValueError: `optim_args` cannot be read.
    """
    try:
        kwargs: dict[str, Any] = {
            "lr": args.learning_rate,
            "betas": (args.adam_beta1, args.adam_beta2),
            "eps": args.adam_epsilon,
            "weight_decay": args.weight_decay,
        }
    except AttributeError as error:
        raise TypeError(f"trainer_kwargs takes transformers.TrainingArguments: {error}") from None
    return AdamW8bit, kwargs | _parse_optim_args(getattr(args, "optim_args", None)) | options


def _parse_optim_args(text: str | None) -> dict[str, Any]:
    """ "codec=dynamic,block_size=64,amsgrad=true" -> names and values."""
    parsed: dict[str, Any] = {}
    for part in (text or "").replace(" ", "").split(","):
        if not part:
            continue
        name, equals, value = part.partition("=")
        if not (name and equals and value):
            raise ValueError(f"optim_args holds {part!r}, which is no name=value")
        words = {"true": True, "false": False, "none": None}
        try:
            parsed[name] = words[value.lower()] if value.lower() in words else ast.literal_eval(value)
        except (ValueError, SyntaxError):
            parsed[name] = value  # a word, such as the name of a codec
    return parsed


def _owners(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Each parameter with the module that owns it and its name there; a tied one with each of its owners."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for path, module in modules.items():
        for name, p in module.named_parameters(recurse=False):
            owner_path, owner = path, module
            while isinstance(owner, _CONTAINERS) and owner_path:
                owner_path, _, attribute = owner_path.rpartition(".")
                name = f"{attribute}_{name}"
                owner = modules[owner_path]
                if isinstance(owner, nn.ModuleDict):  # `parametrizations`, which holds the lists of a module
                    owner_path = owner_path.rpartition(".")[0]
                    owner = modules[owner_path]
            yield owner, name, p


def _biases_and_normalizations(model: nn.Module) -> set[Tensor]:
    return {p for owner, name, p in _owners(model) if _is_bias(name) or _is_normalization(owner, p)}


def _is_bias(name: str) -> bool:
    return not {"bias", "biases"}.isdisjoint(name.split("_"))


def _is_normalization(owner: nn.Module, p: Tensor) -> bool:
    if isinstance(owner, NORMALIZATIONS):
        return True
    is_vector = sum(size != 1 for size in p.shape) <= 1
    return is_vector and any(_NORM_IN_CLASS_NAME.search(cls.__name__) for cls in type(owner).__mro__)


def _selected(model: nn.Module, selectors: Selector | Iterable[Selector], argument: str) -> set[Tensor]:
    """The parameters that some selectors mean."""
    if isinstance(selectors, (str, Tensor, nn.Module, type)):
        selectors = (selectors,)
    modules = dict(model.named_modules(remove_duplicate=False))
    parameters = dict(model.named_parameters(remove_duplicate=False))
    everything = set(parameters.values())
    result: set[Tensor] = set()
    for selector in selectors:
        if isinstance(selector, Tensor):
            if selector not in everything:
                raise ValueError(f"{argument}: a parameter of shape {tuple(selector.shape)} is not in the model")
            result.add(selector)
        elif isinstance(selector, nn.Module):
            if all(selector is not module for module in modules.values()):
                raise ValueError(f"{argument}: a {type(selector).__name__} is given that is not in the model")
            result.update(selector.parameters())
        elif isinstance(selector, type) and issubclass(selector, nn.Module):
            for module in modules.values():
                if isinstance(module, selector):
                    result.update(module.parameters())
        elif isinstance(selector, str):
            if selector in parameters:
                result.add(parameters[selector])
            elif selector in modules:
                result.update(modules[selector].parameters())
            else:
                near = difflib.get_close_matches(selector, [*parameters, *modules], n=3)
                hint = f"; there is {', '.join(near)}" if near else ""
                raise ValueError(f"{argument}: the model has no parameter or module named {selector!r}{hint}")
        else:
            raise TypeError(
                f"{argument} takes modules, parameters, their names and classes of modules, got {selector!r}"
            )
    return result
