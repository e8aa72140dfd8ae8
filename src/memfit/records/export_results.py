"""What `memfit export` measured: written to export.json, read by the report and the model card."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from memfit.config.files import plain, read_json
from memfit.errors import OutputError


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One form of the classifier, as it was measured."""

    name: str
    """`torch`, `onnx` or `onnx-int8`."""
    scheme: str = ""
    """How it was quantized."""
    file: str = ""
    """Its path inside the folder; empty where it was not written."""
    size_bytes: int
    alone_milliseconds: float
    """A text, one after another."""
    batched_milliseconds: float
    """A text, in batches."""
    metric: float
    changed_answers: int
    """Rows that are answered otherwise than by torch."""
    logits_off: float
    """The largest difference to torch's logits."""
    lost_points: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Export:
    """What was written where, and how every variant scored."""

    folder: Path
    metric: str
    rows: int
    scored_on: str
    variants: tuple[Variant, ...]
    refused: str = ""
    """Why a variant that was asked for was not written; empty where all were."""
    versions: Mapping[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for export.json and --json."""
        values: dict[str, Any] = plain(dataclasses.asdict(replace(self, folder=Path())))
        return {**values, "folder": str(self.folder)}


def read_export(folder: Path) -> Export | None:
    """Returns what export.json says of a run; None where there is none that can be read."""
    try:
        values = read_json(folder / "export.json")
        return Export(
            folder=folder,
            metric=str(values["metric"]),
            rows=int(values["rows"]),
            scored_on=str(values["scored_on"]),
            variants=tuple(_variant(one) for one in values["variants"]),
            refused=str(values.get("refused", "")),
        )
    except (OutputError, KeyError, TypeError, ValueError, OverflowError):
        return None


def _variant(values: Mapping[str, Any]) -> Variant:
    kinds = {"str": str, "int": int, "float": float}
    known = {one.name: kinds[str(one.type)] for one in dataclasses.fields(Variant)}
    return Variant(**{name: known[name](value) for name, value in values.items() if name in known})
