"""Hugging Face's keys of families of models, as a scenario's `model`."""
