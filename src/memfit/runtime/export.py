"""The model that is saved at the end has all the bits that were trained.

Low-bit training keeps a weight as a half-precision value and what it cannot hold. Checkpoints
store the two apart, as they lie on the device; a model somebody saves to use gets them joined,
in float32, on the host, one weight at a time.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from memfit.files import atomic_writer
from memfit.runtime.watched import WatchedTraining

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
        if not _internal_call and self.args.should_save:
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
        optimizer: Any = getattr(self.optimizer, "optimizer", self.optimizer)
        halved = any(p.dtype in _HALF and p.requires_grad for p in model.parameters())
        joined = getattr(optimizer, "fp32_state_dict", None)
        if joined is None or not halved:
            return None
        if self._masters_are_older:
            return {name: _widened(value) for name, value in model.state_dict().items()}
        state: dict[str, torch.Tensor] = joined(model, device="cpu")
        return state

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
