"""The model that is saved at the end has all the bits that were trained.

Low-bit training keeps a weight as a half-precision value and what it cannot hold. Checkpoints
store the two apart, as they lie on the device; a model somebody saves to use gets them joined,
in float32, on the host, one weight at a time.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers.trainer_utils import HubStrategy

from memfit.config.files import atomic_writer
from memfit.training.health import WatchedTraining

_OPTIMIZER_FILE = "optimizer.pt"

_HALF = (torch.bfloat16, torch.float16)


class FullPrecisionExport(WatchedTraining):
    """What BudgetTrainer changes in how a model is saved outside of checkpoints."""

    _masters_are_older: bool = False
    _loads_best: bool = False

    @property
    def is_trained(self) -> bool:
        """Whether all steps are done, and the weights not half replaced by the best ones."""
        steps = self.state.max_steps
        return 0 < steps <= self.state.global_step and not self._loads_best

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As the Trainer's; outside of checkpoints in float32 where masters were trained."""
        super().save_model(output_dir, _internal_call)
        # An upload saves by an internal call, too.
        if not self._writing and self.args.should_save:
            self.export_weights(Path(str(output_dir or self.args.output_dir)))

    def export_weights(self, folder: Path) -> bool:
        """Write the masters over half-precision weights in a saved model; whether there are any."""
        model: Any = self.accelerator.unwrap_model(self.model)
        state = self._joined(model) if hasattr(model, "save_pretrained") else None
        if state is None:
            return False
        model.save_pretrained(str(folder), state_dict=state)
        _say_float32(folder / "config.json")
        return True

    def widen_weights(self) -> None:
        """Put the masters in the place of half-precision weights, on the host: training is over.

        Adapters are merged into them there, where the sum loses no bits and the card no memory.
        """
        model: Any = self.accelerator.unwrap_model(self.model)
        state = self._joined(model)
        if state is not None:
            for name, parameter in model.named_parameters(remove_duplicate=False):
                parameter.data = state[name]

    def _joined(self, model: torch.nn.Module) -> dict[str, torch.Tensor] | None:
        """The model's state in float32 on the host; None where it was trained in float32."""
        if not self._has_masters(model):
            return None
        if self._masters_are_older:
            return {name: _widened(value) for name, value in model.state_dict().items()}
        optimizer: Any = getattr(self.optimizer, "optimizer", self.optimizer)
        state: dict[str, torch.Tensor] = optimizer.fp32_state_dict(model, device="cpu")
        return state

    def _has_masters(self, model: torch.nn.Module) -> bool:
        optimizer: Any = getattr(self.optimizer, "optimizer", self.optimizer)
        halved = any(p.dtype in _HALF and p.requires_grad for p in model.parameters())
        return halved and hasattr(optimizer, "fp32_state_dict")

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """The model goes up in float32; a checkpoint, where that is asked for, as it is."""
        model: Any = self.accelerator.unwrap_model(self.model)
        if self._writing or not self._has_masters(model):
            super()._push_from_checkpoint(checkpoint_folder)
            return
        # The Trainer copies the model out of the folder it is given, and uploads the copy. What
        # begins with an underscore is not uploaded itself.
        asked, jobs_before = self.args.hub_strategy, self._upload_jobs()
        with tempfile.TemporaryDirectory(prefix="_float32-", dir=self.args.output_dir) as folder:
            self.export_weights(Path(folder))
            if asked != HubStrategy.END:
                self.args.hub_strategy = HubStrategy.EVERY_SAVE
            try:
                super()._push_from_checkpoint(folder)
            finally:
                self.args.hub_strategy = asked
        begun = self._upload_jobs() != jobs_before
        if begun and asked in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
            self._upload_checkpoint(Path(checkpoint_folder))

    def _upload_jobs(self) -> list[Any]:
        return list(getattr(getattr(self, "push_in_progress", None), "jobs", ()))

    def _upload_checkpoint(self, folder: Path) -> None:
        from huggingface_hub import HfApi

        latest = self.args.hub_strategy == HubStrategy.CHECKPOINT
        job = HfApi().upload_folder(
            repo_id=str(self.hub_model_id),
            folder_path=folder,
            path_in_repo="last-checkpoint" if latest else folder.name,
            commit_message=f"Training in progress, step {self.state.global_step}, checkpoint",
            token=self.args.hub_token,
            run_as_future=True,
            revision=self.args.hub_revision,
        )
        uploads: Any = self.push_in_progress
        uploads.jobs.append(job)

    def _load_best_model(self) -> None:
        """With the optimizer's state of that moment, which holds the rest of each weight."""
        held = self.held_checkpoint()
        self._loads_best = True
        super()._load_best_model()
        # Of a checkpoint the model holds already the optimizer holds the state, too.
        if held is None or str(held) != self.state.best_model_checkpoint:
            self._load_best_masters()
        self._loads_best = False

    def _load_best_masters(self) -> None:
        best = self.state.best_model_checkpoint
        if best is None or self.setup.make_optimizer is None:
            return
        self._masters_are_older = not (Path(best) / _OPTIMIZER_FILE).is_file()
        if not self._masters_are_older:
            self._load_optimizer_and_scheduler(best)


def _widened(value: torch.Tensor) -> torch.Tensor:
    moved = value.detach().cpu()
    return moved.float() if moved.dtype in _HALF else moved


def _say_float32(config: Path) -> None:
    """What the weights are stored in is what they are loaded as."""
    if not config.is_file():
        return  # adapters alone have none
    found = json.loads(config.read_text(encoding="utf-8"))
    found["dtype"] = "float32"
    with atomic_writer(config) as file:
        file.write(json.dumps(found, indent=2, sort_keys=True, ensure_ascii=False) + "\n")
