"""Captures the training step of your own code operator by operator, without a GPU and without memory for its weights.

>>> from calibrate.capture import Step
>>> Step.__name__
'Step'
"""

from __future__ import annotations

from calibrate.capture.step import Step

__all__ = ["Step"]
