"""Simulator of LLM training and inference steps. Never imports torch or calibrate."""
