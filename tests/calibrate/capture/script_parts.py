"""Parts of training scripts."""

from __future__ import annotations

HEAD = """
import torch, torch.nn as nn, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
dist.init_process_group("gloo")
n = dist.get_world_size()
"""
