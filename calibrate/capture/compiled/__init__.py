"""Captures what `torch.compile` makes of code: graphs, their fused kernels, and where a graph breaks."""
