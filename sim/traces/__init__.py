"""Recorded traces: PyTorch profiler (Kineto) JSON in, Chakra execution traces in and out, replayed as tasks."""
