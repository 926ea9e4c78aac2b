"""What a quantization_config says of layers whose weights are not at hand: a scheme for each layer by its name.

    compressed-tensors   config_groups and ignore              modelopt   quant_algo, by layer where it is mixed
    fp8                  weight_block_size, activation_scheme  gptq, awq  bits, group_size, sym or zero_point
    fbgemm_fp8           one scale for each output channel     mxfp4      the experts of gpt-oss

Bytes are those of the container's spelling; files of other writers may hold scales of another width, or an index of
columns more. Methods whose configs do not say how a layer is stored are refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from narrowcast.containers import containers
from narrowcast.containers.compressed_tensors.cache import mode_of
from narrowcast.containers.compressed_tensors.config import arguments
from narrowcast.containers.compressed_tensors.groups import Groups
from narrowcast.containers.compressed_tensors.read import element_of, input_scheme, told_tile
from narrowcast.containers.compressed_tensors.spellings import spell
from narrowcast.containers.contents import Source, contradiction, left_alone
from narrowcast.containers.detect import BESIDE, open_source
from narrowcast.containers.gptq import dynamic_of
from narrowcast.containers.modelopt.config import KV, excluded, labels
from narrowcast.containers.modelopt.spellings import ALGORITHMS
from narrowcast.containers.native_fp8 import block_of
from narrowcast.containers.skipped import skipped_by
from narrowcast.containers.spelling import Spelling
from narrowcast.errors import CheckpointError, UsageError
from narrowcast.model.geometry import Geometry, Matrix
from narrowcast.model.modules import Module
from narrowcast.model.roles import Role, quantization_config
from narrowcast.numbers.formats import BF16, E4M3FN, E8M0, FP32, Format, Kind, formats
from narrowcast.serving.served import Group
from narrowcast.serving.written import nbytes, representatives
from narrowcast.store.checkpoint import Checkpoint
from narrowcast.tensors.presets import EXCLUDED_ROLES, LinearScheme
from narrowcast.tensors.schemes import Scheme, schemes
from narrowcast.tensors.storage import stored_scheme

# What a layer of that name and role computes, or None where it is not quantized.
Layer = Callable[[str, Role], LinearScheme | None]
_BYTEWISE = ("int-quantized", "naive-quantized")
_KEYS = ("num_bits", "type", "symmetric", "strategy", "group_size", "block_structure")


@dataclass(frozen=True)
class Said:
    """A container's name, the cache that the config asks for, what it says of each layer, and the format of
    compressed-tensors that stores narrow codes a byte each, where it names one."""

    container: str
    kv: str | None
    layer: Layer
    config: Mapping[str, Any]
    format: str | None = None

    def groups(self, geometry: Geometry, dtype: Format) -> tuple[tuple[Group, ...], list[str]]:
        """The groups of a model; a matrix whose layers differ becomes one group for each scheme."""
        seen = {module.name: module for module in representatives(geometry.matrices, self.config)}
        found: list[Group] = []
        notes = ["bytes of quantized layers follow from the config; files may hold scales of another width"]
        for matrix in geometry.matrices:
            counts = self._counts(matrix, seen.get(matrix.name.replace("*", "0")), geometry.layers)
            if len(counts) > 1 and matrix.layers < geometry.layers:
                notes.append(
                    f"{matrix.name} is stored in more than one way, and the config does not say in how many layers: "
                    "all are taken for the most frequent"
                )
                counts = Counter({counts.most_common(1)[0][0]: geometry.layers})
            whole = sum(counts.values())
            found += [
                self._group(replace(matrix, layers=matrix.layers * count // whole), linear, dtype)
                for linear, count in counts.items()
            ]
        return tuple(found), notes

    def _counts(self, matrix: Matrix, module: Module | None, layers: int) -> Counter[LinearScheme | None]:
        if module is None or not module.linear or module.tied is not None:
            return Counter({None: 1})
        first, star, rest = matrix.name.partition("*")
        if not star:
            return Counter([self.layer(matrix.name, matrix.role)])
        rest = rest.replace("*", "0")
        return Counter(self.layer(f"{first}{number}{rest}", matrix.role) for number in range(layers))

    def _group(self, matrix: Matrix, linear: LinearScheme | None, dtype: Format) -> Group:
        if linear is None:
            return Group(matrix, None, matrix.parameters * dtype.bits // 8, dtype)
        how = self._spelling(linear, dtype)
        if how is None:
            return Group(matrix, None, 0, dtype).held_in(linear)
        each = nbytes(how, matrix.shape) + matrix.bias * dtype.bits // 8
        return Group(matrix, linear, matrix.layers * matrix.experts * each, dtype, how.format)

    def _spelling(self, linear: LinearScheme, dtype: Format) -> Spelling | None:
        """How the container writes a layer: under the config's own format; None where it is only read."""
        if self.format is not None:
            return spell(self.format, linear.weight, linear)
        spelling = containers[self.container].spelling
        try:
            return spelling(linear, dtype) if spelling is not None else None
        except UsageError:
            return None


def said(config: Mapping[str, Any], beside: Path | None) -> Said | None:
    """What a config and the quantizers' files in a folder say; None of a model that is not quantized. CheckpointError
    for a method whose config alone does not say how layers are stored."""
    block = quantization_config(config)
    folder = beside or Path()
    files = tuple(Path(name) for name in BESIDE if beside is not None and (folder / name).is_file())
    if not block and not files:
        return None
    stub = Checkpoint(folder, dict(config), None, (), {}, None, {}, files, (), ())
    source = open_source(stub, block)
    for name, reader in _READERS.items():
        if containers[name].claims(source):
            layer, kv = reader(source)
            wide = block.get("format") if name == "compressed-tensors" else None
            return Said(name, kv, layer, config, wide if wide in _BYTEWISE else None)
    raise CheckpointError(
        "a config of this method does not say how its layers are stored", where=folder,
        got=block.get("quant_method") or block.get("quant_algo"), wanted=", ".join(_READERS),
        remedy="give the directory with the weights: their headers do",
    )  # fmt: skip


def _compressed_tensors(source: Source) -> tuple[Layer, str | None]:
    groups = Groups.of(source)

    def layer(name: str, role: Role) -> LinearScheme | None:
        group = groups.taking(name) if groups.takes(name) else None
        if group is None or group.weights is None:
            return None
        dynamic = group.inputs is None or group.inputs["dynamic"] not in (False, "local")
        inputs = input_scheme(group.inputs) if group.inputs is not None else None
        return LinearScheme(_weight(group.weights), inputs, dynamic)

    return layer, mode_of(source, groups)


def _weight(args: Mapping[str, Any]) -> Scheme:
    """The scheme of a weight from its whole arguments: the row that is written so, or one of its own."""
    for row in schemes.values():
        written = arguments(row, False, weight=True)
        if all(args.get(key) == written.get(key) for key in _KEYS):
            return row
    element = element_of(args, signed=args["symmetric"])
    scale = FP32 if element.kind is not Kind.INT else BF16
    return stored_scheme(
        element, told_tile(args) or (0, 0), scale, zero=None if args["symmetric"] else element
    )


def _fp8(source: Source) -> tuple[Layer, str | None]:
    config, model = source.config, source.checkpoint.config or {}
    if str(model.get("model_type")).startswith("deepseek_v4"):
        raise CheckpointError(
            "the experts of this family are packed, which its config does not say of each layer",
            where="config.json model_type", got=model.get("model_type"), remedy="give the directory with the weights",
        )  # fmt: skip
    for key, known in (("fmt", ("e4m3",)), ("activation_scheme", ("dynamic", "static"))):
        if config.get(key) not in (None, *known):
            raise contradiction(
                f"{key} is none that engines read", source, got=config[key], wanted=" or ".join(known)
            )
    block = block_of(source)
    kept = tuple(config.get("ignored_layers") or config.get("modules_to_not_convert") or ())
    if block is not None:
        rows, columns = block
        powers = E8M0 if config.get("scale_fmt") == "ue8m0" else FP32
        # DeepSeek V3.1 holds its powers of two in floats; groups of a row are MX's.
        weight = stored_scheme(E4M3FN, (rows, columns), powers if rows == 1 else FP32)
        linear = LinearScheme(weight, stored_scheme(E4M3FN, (1, columns), powers))
    elif config.get("activation_scheme") == "static":
        linear = LinearScheme(schemes["fp8_tensor"], schemes["fp8_tensor"], False)
    else:
        linear = LinearScheme(schemes["fp8_tensor"], schemes["fp8_token"])
    return _all_but(linear, lambda name: skipped_by(name, kept) is not None), None


def _all_but(linear: LinearScheme, kept: Callable[[str], bool]) -> Layer:
    """The same for every linear layer but those of roles that engines never quantize, and what is kept."""
    return lambda name, role: None if role in EXCLUDED_ROLES or kept(name) else linear


def _fbgemm(source: Source) -> tuple[Layer, str | None]:
    kept = tuple(source.config.get("modules_to_not_convert") or ())
    linear = LinearScheme(schemes["fp8_channel"], schemes["fp8_token"])
    return _all_but(linear, lambda name: skipped_by(name, kept) is not None), None


def _gptq(source: Source) -> tuple[Layer, str | None]:
    config = {**source.beside.get("quantize_config.json", {}), **source.config}

    def layer(name: str, role: Role) -> LinearScheme | None:
        if role in EXCLUDED_ROLES and not (role is Role.LM_HEAD and config.get("lm_head")):
            return None
        pattern, over = dynamic_of(source, name, config)
        if pattern.startswith("-:"):
            return None
        return _integers({**config, **over}, asymmetric={**config, **over}.get("sym") is False, source=source)

    return layer, None


def _awq(source: Source) -> tuple[Layer, str | None]:
    places = (
        *(source.beside.get(name, {}) for name in ("quant_config.json", "quantize_config.json")),
        source.config,
    )
    config: dict[str, Any] = {}
    for place in places:
        config |= {
            {"w_bit": "bits", "q_group_size": "group_size"}.get(key, key): value
            for key, value in place.items()
        }
    kept = tuple(config.get("modules_to_not_convert") or ())
    linear = _integers(config, asymmetric=config.get("zero_point") is not False, source=source)
    return _all_but(linear, lambda name: any(part in name for part in kept)), None


def _integers(config: Mapping[str, Any], *, asymmetric: bool, source: Source) -> LinearScheme:
    bits, group = config.get("bits"), config.get("group_size")
    element = formats.get(f"{'uint' if asymmetric else 'int'}{bits}")
    if element is None or type(group) is not int or group < -1 or group == 0:
        raise CheckpointError(
            "the config does not say its width and group size", where=source.checkpoint.root,
            got=f"bits {bits}, group_size {group}", wanted="bits, and a group_size or -1",
        )  # fmt: skip
    tile = (1, group) if group > 0 else (1, 0)
    return LinearScheme(stored_scheme(element, tile, BF16, zero=element if asymmetric else None))


def _modelopt(source: Source) -> tuple[Layer, str | None]:
    told = labels(source)

    def layer(name: str, role: Role) -> LinearScheme | None:
        algorithm, group = told.of(name)
        row = ALGORITHMS.get(algorithm)
        if role in EXCLUDED_ROLES or excluded(name, told.exclude) or not algorithm:
            return None
        if row is None:
            raise CheckpointError(
                "the config names an algorithm that is not known", where=source.checkpoint.root, got=algorithm,
                wanted=", ".join(ALGORITHMS),
            )  # fmt: skip
        if row.weight == "int4":
            return row.linear(stored_scheme(formats["int4"], (1, group or 128), FP32), static=False)
        return row.linear(schemes[row.weight], static=row.dynamic is False)

    return layer, KV.get(told.kv, told.kv.lower()) if told.kv else None


def _mxfp4(source: Source) -> tuple[Layer, str | None]:
    kept = tuple(str(pattern) for pattern in source.config.get("modules_to_not_convert") or ())
    linear = LinearScheme(schemes["mxfp4"])

    def layer(name: str, role: Role) -> LinearScheme | None:
        above = name.rpartition(".")[0]
        return (
            linear
            if role is Role.EXPERT and not any(left_alone(pattern, above) for pattern in kept)
            else None
        )

    return layer, None


_READERS: Mapping[str, Callable[[Source], tuple[Layer, str | None]]] = {
    "compressed-tensors": _compressed_tensors,
    "modelopt": _modelopt,
    "gptq": _gptq,
    "awq": _awq,
    "fp8": _fp8,
    "fbgemm-fp8": _fbgemm,
    "mxfp4": _mxfp4,
}
