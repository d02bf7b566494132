"""Recorded traces: PyTorch profiler (Kineto), Nsight Systems and Chakra in, Chakra out, replayed as tasks."""
