"""Read recorded traces (PyTorch profiler, Nsight Systems, Chakra), replay them as tasks, and write Chakra traces."""
