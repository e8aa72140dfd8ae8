"""What fits a budget: plans are priced by the memory trace before anything is trained."""

from memfit.planner.free import free_strategies
from memfit.planner.microbatch import choose_micro_batching, predict_micro_batch
from memfit.planner.steps import spec_of

__all__ = ["choose_micro_batching", "free_strategies", "predict_micro_batch", "spec_of"]
