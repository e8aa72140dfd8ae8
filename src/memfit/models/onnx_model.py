"""A classifier as an ONNX file: written by the exporter, quantized to 8 bits, run by onnxruntime.

transformers' own exporter is used where the installed version has it, torch's otherwise. Both trace
the model once; rows and length stay dynamic. A file lies where the Hub's loaders look for it:
onnx/model.onnx, and onnx/model_int8.onnx beside it.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import logging
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from memfit.errors import ConfigError, ModelError
from memfit.models.layers import position_limit

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

Array = npt.NDArray[Any]

ONNX_FILES = {"onnx": "onnx/model.onnx", "onnx-int8": "onnx/model_int8.onnx"}
"""The file of each backend, inside a run's folder."""

BACKENDS = ("torch", *ONNX_FILES)

_ONE_FILE_BYTES = 1_800_000_000
"""Larger weights lie beside the graph: protobuf ends at 2 GiB."""

_TRACED_ROWS, _TRACED_TOKENS = 3, 9
"""The shape that is traced. Neither number is 0 or 1, which torch.export would fix."""


_POSITIONS = "memfit.positions"
"""The graph's own note of the model's positions."""


@dataclass(frozen=True)
class Logits:
    """What a model answers, as transformers names it."""

    logits: Array


class OnnxModel:
    """An ONNX classifier on the CPU; called as transformers' model is, with arrays."""

    def __init__(self, file: Path, config: PretrainedConfig, threads: int | None = None) -> None:
        require_onnx("onnxruntime")
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        if threads is not None:
            options.intra_op_num_threads = threads
        try:
            self._session = onnxruntime.InferenceSession(
                str(file), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # onnxruntime's errors share no class of their own
            reason = str(error).splitlines()[0]
            raise ModelError(
                "{file} cannot be read: {reason}; export it again", file=file, reason=reason
            ) from None
        self.file, self.config = file, config
        self.name_or_path = str(file.parents[1])
        self._inputs = {one.name for one in self._session.get_inputs()}
        positions = self._session.get_modelmeta().custom_metadata_map.get(_POSITIONS)
        self.positions = int(positions) if positions else None
        """The most tokens a text may have; None: as many as one likes."""

    def __call__(self, **batch: Array) -> Logits:
        """Returns the logits of a padded batch; inputs the graph does not have are left out."""
        given = {name: np.asarray(batch[name]) for name in self._inputs}
        (logits,) = self._session.run(["logits"], given)
        return Logits(logits)

    def fingerprint(self) -> str:
        """Returns a digest of the file, for whoever must know that the model is the same."""
        digest = hashlib.sha256(str(self.file.stat().st_size).encode())
        with self.file.open("rb") as file:
            digest.update(file.read(1 << 20))
        return digest.hexdigest()


def require_onnx(*packages: str) -> None:
    """Raises one sentence that says what to install where a package of the extra is missing."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                "{package} is not installed; install it with: pip install 'memfit[onnx]'",
                package=package,
            )


def export_onnx(model: PreTrainedModel, names: tuple[str, ...], file: Path) -> None:
    """Writes the model's graph with dynamic rows and lengths; `names` are the tokenizer's inputs.

    The model must be on the CPU, in float32 and in evaluation mode.
    """
    require_onnx("onnx", "onnxscript")
    import torch

    ids = torch.randint(2, 9, (_TRACED_ROWS, _TRACED_TOKENS))
    inputs = {name: torch.zeros_like(ids) for name in names}
    inputs["input_ids"] = ids
    if "attention_mask" in inputs:
        # With padding in it, so that no exporter takes a mask of ones for granted.
        inputs["attention_mask"] = torch.ones_like(ids)
        inputs["attention_mask"][1, -2:] = 0
        ids[1, -2:] = model.config.pad_token_id or 0
    size_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    with _without_cache(model), _quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = _exported(model, inputs)
        program.model.metadata_props[_POSITIONS] = str(position_limit(model) or "")
        file.parent.mkdir(parents=True, exist_ok=True)
        program.save(str(file), external_data=size_bytes > _ONE_FILE_BYTES)


def _exported(model: PreTrainedModel, inputs: dict[str, Any]) -> Any:
    import torch

    # Not named dimensions: DeBERTa's buckets compare the length with numbers of the config.
    dynamic = torch.export.Dim.AUTO
    shapes = {name: {0: dynamic, 1: dynamic} for name in inputs}
    try:
        from transformers.exporters.configs import OnnxConfig
        from transformers.exporters.exporter_onnx import OnnxExporter
    except ImportError:  # transformers before 5.20
        return torch.onnx.export(
            model, args=(), kwargs=inputs, dynamic_shapes=shapes, dynamo=True, opset_version=18,
            verbose=False,
        )  # fmt: skip
    exporter: Any = OnnxExporter
    return exporter().export(model, inputs, OnnxConfig(dynamic=True, dynamic_shapes=shapes))


@contextlib.contextmanager
def _without_cache(model: PreTrainedModel) -> Iterator[None]:
    """A decoder's graph answers the label alone, not the keys and values of every layer."""
    before = getattr(model.config, "use_cache", None)
    if before is not None:
        model.config.use_cache = False
    try:
        yield
    finally:
        if before is not None:
            model.config.use_cache = before


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The exporters print their steps, and warn of packages that no classifier needs."""
    loggers = [logging.getLogger(name) for name in ("transformers", "torch.onnx", "onnxscript")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


# ---- 8 bits ----

SCHEMES = ("per tensor", "per channel", "attention in fp32", "last layers in fp32")
"""Ways of dynamic quantization, the fastest first; the next is tried where one loses too much."""


def quantize(source: Path, target: Path, scheme: str) -> None:
    """Writes the graph with weights in 8 bits; activations are quantized as they come."""
    require_onnx("onnx", "onnxruntime")
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    model = onnx.load(str(source))
    # The shapes the exporter wrote contradict what the quantizer infers: it would refuse them.
    del model.graph.value_info[:]
    large = sum(one.ByteSize() for one in model.graph.initializer) > _ONE_FILE_BYTES
    with _quiet_root():
        quantize_dynamic(
            model,
            str(target),
            weight_type=QuantType.QInt8,
            per_channel=scheme != "per tensor",
            nodes_to_exclude=_left_in_fp32(model, scheme),
            use_external_data_format=large,
        )


@contextlib.contextmanager
def _quiet_root() -> Iterator[None]:
    """onnxruntime's quantizer advises on the root logger."""
    root = logging.getLogger()
    before = root.level
    root.setLevel(logging.ERROR)
    try:
        yield
    finally:
        root.setLevel(before)


def _left_in_fp32(model: Any, scheme: str) -> list[str]:
    """Returns the names of the nodes that a scheme does not quantize, by the module they are in."""
    scopes = {node.name: _module_of(node) for node in model.graph.node}
    if scheme == "attention in fp32":
        return [name for name, scope in scopes.items() if re.search(r"att(entio)?n", scope)]
    if scheme == "last layers in fp32":
        layers = {name: int(found[-1]) for name, scope in scopes.items()
                  if (found := re.findall(r"\.(\d+)(?=\.|$)", scope))}  # fmt: skip
        first = max(layers.values(), default=0) * 3 // 4
        heads = [name for name, scope in scopes.items() if re.search(r"classif|score|pool", scope)]
        return [*(name for name, layer in layers.items() if layer >= first), *heads]
    return []


def _module_of(node: Any) -> str:
    """Returns the path of the module a node was traced in, as both exporters write it down."""
    found: Mapping[str, str] = {one.key: one.value for one in node.metadata_props}
    scopes = re.findall(r"'([^']*)'", found.get("pkg.torch.onnx.name_scopes", ""))
    return scopes[-2] if len(scopes) > 1 else ""
