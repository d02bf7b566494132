"""YAML of Megatron-Bridge and NeMo."""
