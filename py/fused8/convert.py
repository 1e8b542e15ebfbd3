"""Convert optimizer state between fused8 and other libraries, one parameter and one piece of it at a time.

What can be read is listed in foreign.py. What a codec stores exactly is taken over exactly: the same codes and scales
where the target has the same codec and each of its blocks lies within one block of the source. Everything else is
decoded to FP32 and rounded to the nearest code, once and without dither.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import foreign, options, reference
from . import state as state_of
from .codecs import CODECS, FP32, Dynamic
from .foreign import FUSED8
from .options import shown
from .sharding import is_dtensor, local, placed_like, rows_and_inner
from .sources import MOMENTS, Source, require_readable

CHUNK_ELEMENTS = 1 << 20  # decoded at a time; a multiple of all block sizes. Temporaries stay below 100 MB
BITSANDBYTES_MIN_8BIT_SIZE = 4096

Progress = Callable[[int], None]
"""Called with the number of elements of each parameter that is done."""

_HYPERPARAMETERS = ("lr", "betas", "eps", "weight_decay")
_ALSO_TORCH = ("amsgrad", "maximize", "decoupled_weight_decay", "capturable")
_ONLY_FUSED8 = tuple(name for name in options.DEFAULTS if name not in _ALSO_TORCH)


class Converted(NamedTuple):
    tensors: dict[str, Any]
    exact: bool
    """Whether their values are exactly the saved ones."""
    vanished: int = 0
    """Elements whose exp_avg could not be kept, since their exp_avg_sq is 0: no state of Adam, but of 8-bit formats."""


class Report:
    """What was converted and what was lost, for a person to read."""

    def __init__(self, origin: str = FUSED8) -> None:
        self.origin = origin  # one of foreign.py; the functions that take a report set it
        self.lost: dict[str, None] = {}  # in order of appearance
        self.notes: dict[str, None] = {}
        self._vanished = 0
        self._unchanged = 0
        self._conversions: Counter[tuple[str, str, bool]] = Counter()

    def add(self, source: Source, target: str, converted: Converted) -> None:
        if source.storage != target or self.origin != FUSED8:
            self._conversions[source.storage, target, converted.exact] += 1
        else:
            self._unchanged += 1
        self.lost.update(dict.fromkeys(source.lost))
        self._vanished += converted.vanished

    @property
    def converted(self) -> bool:
        """Whether anything is other than it was."""
        changed = any(source != target for source, target, _ in self._conversions)
        return changed or bool(self.lost) or bool(self.notes)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        conversions = [
            {"from": source, "to": target, "exact": exact, "parameters": n}
            for (source, target, exact), n in sorted(self._conversions.items())
        ]
        return {"origin": self.origin, "conversions": conversions, "lost": self._all_lost(), "notes": [*self.notes]}

    def __str__(self) -> str:
        parts = []
        for (source, target, exact), n in sorted(self._conversions.items()):
            parameters = f"{n} parameter{'s' if n != 1 else ''}"
            how = "without loss" if exact else "rounded to the nearest code"
            change = f"in {source}" if source == target else f"from {source} to {target}, {how}"
            parts.append(f"{parameters} {change}")
        unchanged = "as it was" if self._unchanged else "no parameter has any"
        text = f"state of {self.origin}: {'; '.join(parts) or unchanged}."
        if lost := self._all_lost():
            text += f" Lost: {', '.join(lost)}."
        return text + "".join(f" {note}." for note in self.notes)

    def _all_lost(self) -> list[str]:
        vanished = f"exp_avg of {self._vanished:,} elements whose exp_avg_sq had already become 0"
        return [*self.lost, *([vanished] if self._vanished else [])]


# -- one parameter ----------------------------------------------------------------------------------------------------


def own_state(source: Source, p: Tensor, group: Mapping[str, Any], device: torch.device) -> Converted:
    """The state that a parameter needs in a param group of fused8, from a saved one.

    Args:
        source: the saved state.
        p: the parameter, or any tensor of its shape and placement.
        group: the options of fused8 that decide its state.
        device: where the state goes. The arithmetic is done there too.

    Returns:
        `step` (float32 scalar, on the CPU) and the tensors that state.specs_of_parameter describes, all of them copies.
    """
    specs = state_of.specs_of_parameter(p, group)
    shape = local(p).shape
    codec_name = state_of.codec_of_parameter(p, group)
    converted = encode(source, *rows_and_inner(shape), codec_name, group["block_size"], device, group["amsgrad"])
    state: dict[str, Any] = {"step": torch.tensor(float(source.step), dtype=torch.float32, device="cpu")}
    for name, tensor in converted.tensors.items():
        tensor = tensor if name.endswith("_scale") else tensor.view(shape)
        state[name] = placed_like(p, tensor, specs[name].shape)
    return converted._replace(tensors=state)


def encode(
    source: Source, rows: int, inner: int, codec_name: str, block_size: int, device: torch.device, amsgrad: bool
) -> Converted:
    """A saved state in blocks of the rows of [rows, inner]: codes [rows, inner], scales [rows, blocks per row].

    FP32 moments [rows, inner] when the codec is "fp32".
    """
    names = MOMENTS if amsgrad else MOMENTS[:2]
    if amsgrad and len(source.read(0, 0, device)) < len(names):
        raise ValueError(f"lacks {MOMENTS[2]}, which amsgrad needs")
    if codec_name == FP32:
        moments = {name: torch.empty(rows * inner, dtype=torch.float32, device=device) for name in names}
        for start, stop in _ranges(rows, inner):
            for name, piece in zip(names, source.read(start, stop, device), strict=False):
                moments[name][start:stop] = piece
        exact = source.storage != "64 bits"
        return Converted({name: moment.view(rows, inner) for name, moment in moments.items()}, exact)

    blocks = source.blocks
    if blocks is not None and blocks.codec == codec_name:
        scales = blocks.scales_for(rows, inner, block_size)
        if scales is not None:
            copied = {}
            for name, codes, scale in zip(names, blocks.codes, scales, strict=False):
                copied[name] = codes.view(rows, inner).to(device, copy=True)
                copied[f"{name}_scale"] = scale.to(device, copy=True).contiguous()
            return Converted(copied, exact=True)

    codec = CODECS[codec_name]
    result = {}
    for i, name in zip((0, 1, 1), names, strict=False):
        result[name] = torch.empty(rows, inner, dtype=codec.code_dtypes[i], device=device)
        scale_shape = (rows, -(-inner // block_size))
        result[f"{name}_scale"] = torch.empty(scale_shape, dtype=codec.scale_dtypes[i], device=device)
    vanished = torch.zeros((), dtype=torch.int64, device=device)
    for start, stop in _ranges(rows, inner):
        row, column = divmod(start, inner)
        last_row = max(row + 1, stop // inner)
        columns = slice(column, column + (stop - start) // (last_row - row))
        first_block = column // block_size
        shape = (last_row - row, columns.stop - columns.start)
        pieces = [reference._to_blocks(x.view(shape), block_size) for x in source.read(start, stop, device)]
        m, v = pieces[:2]
        encoded = codec.encode_nearest(m, v)
        vanished += ((v == 0) & (m != 0) & (encoded.exp_avg == codec.zero_codes[0])).sum()
        new = [(encoded.exp_avg, encoded.exp_avg_scale), (encoded.exp_avg_sq, encoded.exp_avg_sq_scale)]
        if amsgrad:
            new.append(codec.encode_sq(pieces[2]))
        for name, (codes, scale) in zip(names, new, strict=True):
            scale = scale.view(shape[0], -1)
            result[name][row:last_row, columns] = reference._from_blocks(codes, *shape)
            result[f"{name}_scale"][row:last_row, first_block : first_block + scale.shape[1]] = scale
    return Converted(result, exact=False, vanished=int(vanished))


def _ranges(rows: int, inner: int) -> Iterator[tuple[int, int]]:
    """Ranges of elements of about CHUNK_ELEMENTS: whole rows, or pieces of one row that begin at block boundaries."""
    if rows * inner == 0:
        return
    if inner <= CHUNK_ELEMENTS:
        step = CHUNK_ELEMENTS // inner * inner
        for start in range(0, rows * inner, step):
            yield start, min(start + step, rows * inner)
        return
    for row in range(rows):
        for column in range(0, inner, CHUNK_ELEMENTS):
            yield row * inner + column, row * inner + min(column + CHUNK_ELEMENTS, inner)


# -- state dicts ------------------------------------------------------------------------------------------------------


def check_structure(state_dict: Any) -> None:
    """Raise unless this has the form of an optimizer state dict. The state tensors are not looked at.

    `state` maps keys to the states of parameters, and each of `param_groups` lists the keys of its parameters.

    Raises:
        TypeError, ValueError: it does not.
    """
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"an optimizer state dict is expected, not {type(state_dict).__name__}")
    for name in ("state", "param_groups"):
        if name not in state_dict:
            raise ValueError(f"this is no optimizer state: it has no {name!r}")
    if not isinstance(state_dict["state"], Mapping):
        raise TypeError(f"'state' must be a dict, not {type(state_dict['state']).__name__}")
    for key, value in state_dict["state"].items():
        if not isinstance(value, Mapping):
            raise TypeError(f"the state of parameter {shown(key)} must be a dict, not {type(value).__name__}")
    groups = state_dict["param_groups"]
    if not isinstance(groups, (list, tuple)) or not all(isinstance(group, Mapping) for group in groups):
        raise TypeError("'param_groups' must be a list of dicts")
    seen = set()
    for number, group in enumerate(groups):
        keys, names = group.get("params"), group.get("param_names")
        if not isinstance(keys, (list, tuple)):
            raise ValueError(f"param group {number} of the saved state has no list of 'params'")
        if names is not None and not (isinstance(names, (list, tuple)) and len(names) == len(keys)):
            raise ValueError(f"param group {number} of the saved state has param_names that do not fit its params")
        for key in keys:
            if not isinstance(key, (int, str)):
                raise TypeError(f"param group {number} of the saved state names a parameter {shown(key)}")
            if key in seen:
                raise ValueError(f"the saved state names parameter {key!r} twice")
            seen.add(key)


def check_group(group: Mapping[str, Any], where: str) -> None:
    """Raise ValueError or TypeError for a saved param group, complete with defaults, that is out of range."""
    for name in options.DEFAULTS:
        if isinstance(group[name], Tensor):
            raise ValueError(f"{where}: {name} must not be a tensor")
    for name in _HYPERPARAMETERS:
        value = group[name]
        for x in value if isinstance(value, (tuple, list)) else [value]:
            if isinstance(x, Tensor):
                require_readable(f"{where}: {name}", x)
                if x.is_complex() or x.numel() != 1:
                    raise ValueError(
                        f"{where}: {name} must be a number, got a tensor of {x.numel()} {x.dtype} elements"
                    )
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.device.type == "cpu" and not 0 <= float(lr) < math.inf:
        raise ValueError(f"{where}: lr must be a finite number >= 0, got {float(lr):g}")
    version = group["state_format"]
    if not isinstance(version, int) or version != state_of.STATE_FORMAT:
        raise ValueError(f"{where} has format {shown(version)}, which this version cannot read")
    options.check(group, where)


def to_fused8_state_dict(
    state_dict: Mapping[str, Any],
    *,
    codec: str = "adaptive",
    block_size: int = 256,
    report: Report | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """An optimizer state dict of any known format as Adam8bit and AdamW8bit save it.

    This is for files: their `load_state_dict` takes the other formats too. Which parameters are kept in 8 bits follows
    from their shapes, and in a state of fused8 from its own options.

    Args:
        state_dict: of fused8, torch.optim.Adam or AdamW, bitsandbytes, torchao or FlashOptim.
        codec, block_size: the format to convert to.
        report: takes down what was converted; an empty one is `Report()`.
        progress: see Progress.

    Raises:
        TypeError, ValueError: it is of no known format, or damaged.
    """
    report = report or Report()
    groups = _complete_groups(state_dict, report)
    targets = [group | {"codec": codec, "block_size": block_size} for group in groups]
    for number, group in enumerate(targets):
        check_group(group, f"param group {number}")
    states = dict(state_dict["state"])
    for saved in _saved_parameters(state_dict, groups):
        p, group = saved.example, targets[saved.group]
        try:
            converted = own_state(saved.source, p, group, local(p).device)
        except ValueError as error:
            raise ValueError(f"the saved state of parameter {shown(saved.key)} {error}") from None
        states[saved.key] = converted.tensors
        report.add(saved.source, foreign.in_words(state_of.codec_of_parameter(p, group), block_size), converted)
        if progress:
            progress(p.numel())
    return {**state_dict, "state": states, "param_groups": targets}


def to_torch_state_dict(
    state_dict: Mapping[str, Any],
    *,
    device: torch.device | str | None = None,
    report: Report | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """An optimizer state dict of any known format as torch.optim.AdamW saves it, in FP32.

    `step`, `exp_avg`, `exp_avg_sq` and, with amsgrad, `max_exp_avg_sq`; each group has the keys that torch.optim.Adam
    and AdamW need. A state with decoupled_weight_decay=False is for Adam: AdamW decouples whatever it loads. The whole
    state in FP32 is four times as large as in 8 bits: `device="cpu"` keeps it off the accelerator. Other arguments and
    errors as in `to_fused8_state_dict`.
    """
    report = report or Report()
    groups = _complete_groups(state_dict, report)
    states = dict(state_dict["state"])
    for saved in _saved_parameters(state_dict, groups):
        p, group = saved.example, groups[saved.group] | {"state_bits": 32}
        where = local(p).device if device is None else torch.device(device)
        converted = own_state(saved.source, p, group, where)
        states[saved.key] = converted.tensors
        report.add(saved.source, foreign.in_words(FP32, 0), converted)
        if progress:
            progress(p.numel())
    for_torch: dict[str, Any] = {"foreach": None, "differentiable": False, "fused": None}
    return {
        **state_dict,
        "state": states,
        "param_groups": [_without(group, _ONLY_FUSED8) | for_torch for group in groups],
    }


def to_bitsandbytes_state_dict(
    state_dict: Mapping[str, Any], *, report: Report | None = None, progress: Progress | None = None
) -> dict[str, Any]:
    """An optimizer state dict of any known format as bitsandbytes' Adam8bit and AdamW8bit load it.

    Parameters of 4096 elements or more get 8 bits, as there; what fused8 keeps in 32 bits stays so. A state of the
    codec `dynamic` in blocks of 256 keeps its codes and scales if the rows are divisible by 256 or there is only one.
    Other arguments as in `to_fused8_state_dict`.

    Raises:
        TypeError, ValueError: it is of no known format, damaged, or sharded (DTensor); or it maximizes or adds weight
            decay to the gradient, which bitsandbytes' Adam cannot do.
    """
    report = report or Report()
    groups = _complete_groups(state_dict, report)
    for number, group in enumerate(groups):
        if group["maximize"]:
            raise ValueError(f"param group {number} maximizes, which bitsandbytes cannot do")
        if group["weight_decay"] and not group["decoupled_weight_decay"]:
            raise ValueError(
                f"param group {number} adds weight decay to the gradient (decoupled_weight_decay=False), which "
                "bitsandbytes cannot do"
            )
        if group["amsgrad"]:
            report.lost["max_exp_avg_sq, since bitsandbytes has no amsgrad"] = None
    maps = {"qmap1": torch.tensor(Dynamic.SIGNED, device="cpu"), "qmap2": torch.tensor(Dynamic.UNSIGNED, device="cpu")}
    block_size = foreign.BITSANDBYTES_BLOCKS[0]
    states = dict(state_dict["state"])
    for saved in _saved_parameters(state_dict, groups):
        p, source = saved.example, saved.source
        if is_dtensor(p):
            raise ValueError(f"{saved.name} is a DTensor: gather the state before converting it to bitsandbytes")
        kept = source.in_32bit and report.origin == FUSED8
        codec_name = FP32 if kept or p.numel() < BITSANDBYTES_MIN_8BIT_SIZE else Dynamic.name
        converted = encode(source, 1, p.numel(), codec_name, block_size, p.device, amsgrad=False)
        tensors = converted.tensors
        state = {"state1": tensors["exp_avg"].view(p.shape), "state2": tensors["exp_avg_sq"].view(p.shape)}
        if codec_name != FP32:
            maps = {name: qmap.to(p.device) for name, qmap in maps.items()}  # one of each for all parameters, as there
            state |= maps
            state |= {"absmax1": tensors["exp_avg_scale"].view(-1), "absmax2": tensors["exp_avg_sq_scale"].view(-1)}
        states[saved.key] = {"step": source.step, foreign.NESTED_BITSANDBYTES: state}
        report.add(source, foreign.in_words(codec_name, block_size), converted)
        if progress:
            progress(p.numel())
    dropped = (*_ONLY_FUSED8, "amsgrad", "maximize", "decoupled_weight_decay", "capturable")
    for_bitsandbytes: dict[str, Any] = {"alpha": 0.0, "t_alpha": None, "t_beta3": None}
    return {
        **state_dict,
        "state": states,
        "param_groups": [
            {name: foreign.number(value) for name, value in _without(group, dropped).items()} | for_bitsandbytes
            for group in groups
        ],
    }


class _SavedParameter(NamedTuple):
    key: Any
    group: int
    name: str
    example: Tensor
    source: Source


def _complete_groups(state_dict: Mapping[str, Any], report: Report) -> list[dict[str, Any]]:
    """The groups of a state dict that was checked, in the words of fused8, with defaults for what is missing."""
    check_structure(state_dict)
    report.origin = foreign.origin_of(state_dict)
    groups = []
    for number, saved in enumerate(state_dict["param_groups"]):
        if missing := [name for name in _HYPERPARAMETERS if name not in saved]:
            raise ValueError(f"param group {number} of the saved state lacks {', '.join(missing)}")
        group = options.DEFAULTS | foreign.adapted_group(saved, report.origin, {})
        check_group(group, f"param group {number} of the saved state")
        groups.append(group)
    return groups


def _saved_parameters(state_dict: Mapping[str, Any], groups: list[dict[str, Any]]) -> Iterator[_SavedParameter]:
    """Each parameter of the groups that has state, with its reader. `groups` say how to read it."""
    for number, group in enumerate(groups):
        for i, key in enumerate(group["params"]):
            state = state_dict["state"].get(key)
            if not state:
                continue
            name = options.parameter_name(group, number, i)
            if "param_correction" in state:
                raise ValueError(
                    f"the saved state of {name} has extra mantissa bits (master_bits), which a converted file cannot "
                    "carry: load it into an optimizer of fused8, whose master_state_dict has the weights in FP32"
                )
            try:
                example = foreign.example(state)
                source = foreign.source_of(state, example, group)
            except ValueError as error:
                raise ValueError(f"the saved state of {name} {error}") from None
            yield _SavedParameter(key, number, name, example, source)


def _without(group: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in names}
