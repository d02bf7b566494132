"""Lets torch run on a CPU as it does on a GPU: which operators it calls, where tensors lie, what streams hold."""
