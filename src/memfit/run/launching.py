"""A training on several GPUs that one process starts: `--gpus 2`, `finetune(..., gpus=2)`.

A notebook forks its ranks, if it can: `notebook_ranks.py`. Otherwise they are fresh processes,
started by torchrun's agent with the command `memfit train` and a TOML file of the settings. So a
script needs no guard around its main part, and a notebook may have used the GPU before. This
process waits, and reads the result from the run's folder.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.config import RunConfig, files
from memfit.config.launched import in_notebook, launched_rank
from memfit.config.training_fields import SECRET_FIELDS
from memfit.errors import ConfigError, OutputError
from memfit.i18n import t
from memfit.run.notebook_ranks import cannot_fork, fork_ranks
from memfit.run.rank_agent import RanksEndedError, count_of, start_ranks
from memfit.waiting import shown_by_bar

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memfit.planner.plans import Plan


def ranks_to_start(config: RunConfig) -> int:
    """How many ranks this process is to start: 1 if a launcher has started it as one of several."""
    is_launched = os.environ.get("LOCAL_RANK") or launched_rank().world_size > 1
    if config.gpus is None or is_launched:
        return 1
    return count_of(config.gpus)


def train_on_ranks(
    count: int,
    config: RunConfig,
    *,
    resume: bool,
    quiet: bool,
    watch: bool,
    callbacks: Sequence[Any],
    plan: Plan | None,
) -> None:
    """Trains in so many processes; RanksEndedError where they fail."""
    if config.output_dir is None:
        raise OutputError(t("no output folder given; name one with --output-dir"))
    reason = cannot_fork() if in_notebook() else None
    if in_notebook() and reason is None:
        from memfit.run.train import train_classifier

        how: dict[str, Any] = {"resume": resume, "quiet": quiet, "watch": watch, "plan": plan}
        fork_ranks(count, partial(train_classifier, config, callbacks=callbacks, **how))
        return
    if callbacks and reason is not None:
        raise ConfigError(
            t(
                "gpus={count} trains in forks of this notebook, which get your callbacks, but "
                "{reason}; restart the notebook and call finetune first, or leave callbacks out",
                count=count,
                reason=reason,
            )
        )
    if callbacks:
        raise ConfigError(
            t(
                "gpus={count} trains in other processes, which callbacks cannot be sent to; start "
                "the script with torchrun --nproc-per-node {count} and leave gpus out",
                count=count,
            )
        )
    with tempfile.TemporaryDirectory(prefix="memfit-settings-") as name, _secrets(config):
        settings = Path(name) / "run.toml"
        if plan is not None:
            plan.write(Path(name) / "plan.toml")
            config = replace(config, plan=str(Path(name) / "plan.toml"), named_plan={})
        settings.write_text(config.to_toml(), encoding="utf-8")
        words = ["train", "--config", str(settings), "--output-dir", str(config.output_dir)]
        flags = {
            "--resume": resume,
            "--quiet": quiet,
            "--watch": watch,
            "--no-cache": not files.cache_is_used(),
        }
        words += [flag for flag, is_set in flags.items() if is_set]
        shown_by_bar(True)  # rank 0 has the terminal
        try:
            code = start_ranks(count, words, results=False)
        finally:
            shown_by_bar(False)
        if code:
            raise RanksEndedError(code)


@contextmanager
def _secrets(config: RunConfig) -> Iterator[None]:
    """Hands a token to the ranks by the variable that hubs read; it is written to no file."""
    token = next((config.training[name] for name in SECRET_FIELDS & config.training.keys()), None)
    before = os.environ.get("HF_TOKEN")
    if token is not None:
        os.environ["HF_TOKEN"] = str(token)
    try:
        yield
    finally:
        if token is not None:
            with suppress(KeyError):
                del os.environ["HF_TOKEN"]
            if before is not None:
                os.environ["HF_TOKEN"] = before
