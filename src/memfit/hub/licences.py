"""The licences a model card may name, as the hubs spell them."""

from __future__ import annotations

from memfit.errors import ConfigError, nearest
from memfit.messages import t

# https://huggingface.co/docs/hub/repositories-licenses; those that carry a model's own name left
# out but for the most common.
LICENCES = (
    "apache-2.0", "mit", "openrail", "bigscience-openrail-m", "creativeml-openrail-m",
    "bigscience-bloom-rail-1.0", "bigcode-openrail-m", "afl-3.0", "artistic-2.0", "bsl-1.0", "bsd",
    "bsd-2-clause", "bsd-3-clause", "bsd-3-clause-clear", "c-uda", "cc", "cc0-1.0", "cc-by-2.0",
    "cc-by-2.5", "cc-by-3.0", "cc-by-4.0", "cc-by-sa-3.0", "cc-by-sa-4.0", "cc-by-nc-2.0",
    "cc-by-nc-3.0", "cc-by-nc-4.0", "cc-by-nd-4.0", "cc-by-nc-nd-3.0", "cc-by-nc-nd-4.0",
    "cc-by-nc-sa-2.0", "cc-by-nc-sa-3.0", "cc-by-nc-sa-4.0", "cdla-sharing-1.0",
    "cdla-permissive-1.0", "cdla-permissive-2.0", "wtfpl", "ecl-2.0", "epl-1.0", "epl-2.0",
    "etalab-2.0", "eupl-1.1", "eupl-1.2", "agpl-3.0", "gfdl", "gpl", "gpl-2.0", "gpl-3.0", "lgpl",
    "lgpl-2.1", "lgpl-3.0", "isc", "h-research", "intel-research", "lppl-1.3c", "ms-pl", "mpl-2.0",
    "odc-by", "odbl", "openrail++", "osl-3.0", "postgresql", "ofl-1.1", "ncsa", "unlicense", "zlib",
    "pddl", "deepfloyd-if-license", "fair-noncommercial-research-license", "llama2", "llama3",
    "llama3.1", "llama3.2", "llama3.3", "llama4", "gemma", "apple-amlr", "unknown", "other",
)  # fmt: skip
COMMON = ("apache-2.0", "mit", "cc-by-4.0", "cc-by-nc-4.0", "other")


def checked_licence(licence: str | None) -> str:
    """The licence as the hubs spell it; a model without one may not be used by anybody."""
    if licence is None or not licence.strip():
        raise ConfigError(
            t(
                "no licence given; name one with --licence, for instance --licence {first} (or "
                "{others})",
                first=COMMON[0],
                others=", ".join(COMMON[1:]),
            )
        )
    known = licence.strip().lower().replace(" ", "-")
    if known not in LICENCES:
        hint = nearest(known, LICENCES)
        raise ConfigError(
            t(
                "--licence is {name}, which the hubs do not know.{hint} Write other for one of "
                "your own",
                name=repr(licence),
                hint=hint,
            )
        )
    return known
