"""Transformers' `TrainingArguments` and what is put around them: DeepSpeed, Accelerate, TRL, Axolotl, ms-swift."""
