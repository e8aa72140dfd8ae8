"""A Trainer whose loaders hand out effective batches on the CPU, in an order a resume repeats."""

from __future__ import annotations

from typing import Any

import transformers
from torch.utils.data import DataLoader, Sampler, SequentialSampler
from transformers.trainer_pt_utils import LengthGroupedSampler

from memfit.runtime.checkpoint import EpochLengthSampler
from memfit.strategies import Setup


class EffectiveLoading(transformers.Trainer):
    """What BudgetTrainer changes in how rows are loaded."""

    setup: Setup

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Effective batches stay on the CPU; micro-batches go to the device."""
        return _kept_on_cpu(super().get_train_dataloader())

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """Evaluation batches stay on the CPU; micro-batches go to the device."""
        return _kept_on_cpu(super().get_eval_dataloader(eval_dataset))

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader[Any]:
        """Test batches stay on the CPU; micro-batches go to the device."""
        return _kept_on_cpu(super().get_test_dataloader(test_dataset))

    def _get_dataloader(self, dataset: Any, *args: Any, **kwargs: Any) -> DataLoader[Any]:
        """As the Trainer's, from the rows a strategy has put in the place of these."""
        own = self.data_collator
        dataset, self.data_collator = self.setup.data_for(dataset, own)
        try:
            loader: DataLoader[Any] = super()._get_dataloader(dataset, *args, **kwargs)
            return loader
        finally:
            self.data_collator = own

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int] | None:
        sampler = super()._get_train_sampler(train_dataset)
        if not isinstance(sampler, LengthGroupedSampler):
            return sampler
        data_seed = self.args.data_seed
        seed = self.args.seed if data_seed is None else data_seed
        return EpochLengthSampler(sampler.batch_size, list(sampler.lengths), seed)

    def _get_eval_sampler(self, eval_dataset: Any) -> Sampler[int] | None:
        # The stock one shuffles evaluation too when training groups by length: predictions
        # would come back in another order than the rows.
        sampler = super()._get_eval_sampler(eval_dataset)
        is_grouped = isinstance(sampler, LengthGroupedSampler)
        return SequentialSampler(eval_dataset) if is_grouped else sampler


def _kept_on_cpu(dataloader: DataLoader[Any]) -> DataLoader[Any]:
    if hasattr(dataloader, "device"):
        dataloader.device = None
    return dataloader
