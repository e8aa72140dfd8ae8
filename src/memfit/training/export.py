"""The model that is saved at the end has all the bits that were trained.

Low-bit training keeps a weight as a half-precision value and what it cannot hold. Checkpoints
store the two apart, as they lie on the device. A model that is saved for use gets them joined, in
float32, on the host, one weight at a time.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers.trainer_utils import HubStrategy

from memfit.config.files import atomic_writer
from memfit.training.guard.updates import unwrapped

if TYPE_CHECKING:
    from memfit.training.trainer import BudgetTrainer

_OPTIMIZER_FILE = "optimizer.pt"

_HALF = (torch.bfloat16, torch.float16)


class MasterWeights:
    """The weights of a low-bit training in full precision; there are none in other trainings."""

    def __init__(
        self, trainer: BudgetTrainer, load_optimizer: Callable[[str | None], None]
    ) -> None:
        self._trainer = trainer
        self._load_optimizer = load_optimizer
        self._are_older = False
        """Whether the model was loaded from a checkpoint without its masters."""

    @property
    def exist(self) -> bool:
        """Whether the optimizer keeps what half-precision weights cannot hold."""
        halved = any(p.dtype in _HALF and p.requires_grad for p in self._model.parameters())
        return halved and hasattr(unwrapped(self._trainer.optimizer), "fp32_state_dict")

    def joined(self) -> dict[str, torch.Tensor] | None:
        """The model's state in float32 on the host; None where it was trained in float32."""
        if not self.exist:
            return None
        if self._are_older:
            host = {name: value.detach().cpu() for name, value in self._model.state_dict().items()}
            return {n: v.float() if v.dtype in _HALF else v for n, v in host.items()}
        optimizer = unwrapped(self._trainer.optimizer)
        state: dict[str, torch.Tensor] = optimizer.fp32_state_dict(self._model, device="cpu")
        return state

    def export(self, folder: Path) -> bool:
        """Write the masters over half-precision weights in a saved model; whether there are any."""
        state = self.joined() if hasattr(self._model, "save_pretrained") else None
        if state is None:
            return False
        self._model.save_pretrained(str(folder), state_dict=state)
        config = folder / "config.json"
        if config.is_file():  # adapters alone have none; weights are loaded in the type it names
            found = json.loads(config.read_text(encoding="utf-8")) | {"dtype": "float32"}
            with atomic_writer(config) as file:
                file.write(json.dumps(found, indent=2, sort_keys=True, ensure_ascii=False) + "\n")
        return True

    def widen(self) -> None:
        """Put the masters in the place of half-precision weights, on the host: training is over.

        Adapters are merged into them there, where the sum loses no bits and the card no memory.
        """
        state = self.joined()
        if state is not None:
            for name, parameter in self._model.named_parameters(remove_duplicate=False):
                parameter.data = state[name]

    def load(self, checkpoint: Path) -> None:
        """Loads the checkpoint's optimizer state too, which holds the rest of each weight."""
        if self._trainer.setup.make_optimizer is None:
            return
        self._are_older = not (checkpoint / _OPTIMIZER_FILE).is_file()
        if not self._are_older:
            self._load_optimizer(str(checkpoint))

    def push(self, checkpoint: Path, push: Callable[[str], None]) -> None:
        """The model goes up in float32; a checkpoint, where that is asked for, as it is."""
        if not self.exist:
            push(str(checkpoint))
            return
        args = self._trainer.args
        asked, before = args.hub_strategy, self._upload_jobs()
        if asked == HubStrategy.END:
            return
        # The Trainer copies the model out of the folder it is given, and uploads the copy. What
        # begins with an underscore is not uploaded itself.
        folder = tempfile.mkdtemp(prefix="_float32-", dir=args.output_dir)
        args.hub_strategy, begun = HubStrategy.EVERY_SAVE, list[Any]()
        try:
            self.export(Path(folder))
            push(folder)
            begun = [job for job in self._upload_jobs() if job not in before]
        finally:
            args.hub_strategy = asked
            # An upload lists the whole output folder in its own thread, and fails without a word
            # where a folder disappears meanwhile.
            if begun:
                begun[-1].add_done_callback(lambda _: shutil.rmtree(folder, ignore_errors=True))
            else:
                shutil.rmtree(folder, ignore_errors=True)
        if begun and asked in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
            self._upload(checkpoint)

    @property
    def _model(self) -> Any:
        return self._trainer.accelerator.unwrap_model(self._trainer.model)

    def _upload_jobs(self) -> list[Any]:
        return list(getattr(getattr(self._trainer, "push_in_progress", None), "jobs", ()))

    def _upload(self, checkpoint: Path) -> None:
        from huggingface_hub import upload_folder

        trainer: Any = self._trainer
        latest = trainer.args.hub_strategy == HubStrategy.CHECKPOINT
        # One thread of the library's uploads one folder after the other: none overtakes another.
        job = upload_folder(
            repo_id=str(trainer.hub_model_id),
            folder_path=checkpoint,
            path_in_repo="last-checkpoint" if latest else checkpoint.name,
            commit_message=f"Training in progress, step {trainer.state.global_step}, checkpoint",
            token=trainer.args.hub_token,
            run_as_future=True,
            revision=trainer.args.hub_revision,
        )
        trainer.push_in_progress.jobs.append(job)
