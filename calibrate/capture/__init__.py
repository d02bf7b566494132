"""Capture of a training step that somebody else wrote: operator by operator, without a GPU and without its memory.

>>> from calibrate.capture import Step
>>> Step.__name__
'Step'
"""

from __future__ import annotations

from calibrate.capture.step import Step

__all__ = ["Step"]
