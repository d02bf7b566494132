"""Another trainer's configuration as a scenario: Megatron-LM's arguments, torchtitan's configs, DeepSpeed's JSON,
Transformers' `TrainingArguments`. Nothing of a file is run."""
