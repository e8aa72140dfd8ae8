"""One configuration: a TOML file, flags and keywords are the same names.

Others import DataConfig, ModelConfig and RunConfig from here; `files` reads and writes what users
keep, `training_fields` knows the fields of TrainingArguments. Nothing here imports torch.
"""

from memfit.config.schema import DataConfig, ModelConfig, RunConfig

__all__ = ["DataConfig", "ModelConfig", "RunConfig"]
