"""Makes one message of an error in captured code: its line and the error."""

from __future__ import annotations

import sysconfig
import traceback

from sim.core.errors import InputError

OURS = ("/torch/", "/calibrate/capture/", "<frozen", "<string>")
LIBRARIES = ("/site-packages/", "/dist-packages/", sysconfig.get_path("stdlib") + "/")
WITHOUT_DATA = {  # torch's errors for what fake tensors cannot answer
    "DataDependentOutputException": "the code reads a tensor's value, which is unknown without data",
    "DynamicOutputShapeException": "the shape of the operator's result depends on data, which a capture does not have",
    "UnsupportedOperatorException": "torch has no fake implementation of the operator, which tells its result's shape",
}
NO_GPU = (
    "the code names a GPU, and a capture has none: make model and inputs without a device (their operators are "
    "captured as a GPU's), or capture a script (--script), which may name it"
)
SAID = {  # what torch says, and what it means for a capture
    "Cannot access storage of SparseTensorImpl": "sparse tensors cannot be captured; leave out sparse=True, or make "
    "them dense (to_dense)",
    "SparseAdam does not support dense gradients": "sparse gradients cannot be captured; leave out sparse=True, and "
    "take Adam in place of SparseAdam",
    "self.shape_env must not be None": "nested tensors have sizes that depend on data, which a capture does not have; "
    "give padded tensors, or joined ones (varlen_attn)",
    "Creating a new Tensor subclass Params4bit": "layers of bitsandbytes in 4 bits cannot be captured; "
    "a scenario's key training.lora describes adapters on such weights",
    "Creating a new Tensor subclass Int8Params": "layers of bitsandbytes in 8 bits cannot be captured; leave "
    "them in 16 bits",
    "Creating a new Tensor subclass UninitializedParameter": "layers that learn their sizes from the first input "
    "(LazyLinear) cannot be captured; give their sizes",
    "UnknownCount": "the code reads an integer that depends on data, and makes a size of it; if it depends on a "
    "router's choices alone, --routing balanced makes it known",
    ".numpy() is not supported for tensor subclasses": "the code turns a tensor into a NumPy array, whose values are "
    "unknown without data",
    "trying to get value out of a tracing tensor": "the code reads a tensor's value, which a graph does not have",
    "found at least two devices": NO_GPU,
    "Torch not compiled with CUDA enabled": NO_GPU,
    "Found no NVIDIA driver": NO_GPU,
    "its data is not allocated yet": "torch's own code reads a tensor's values, which a capture does not have",
}


def failure(error: Exception, what: str) -> InputError:
    """Return the message for an error of captured code; `what` names the code if no line of it is in the traceback."""
    return InputError(f"{_line_of(error, what)}: {reason(error)}")


def reason(error: Exception) -> str:
    """Return what an error of captured code means."""
    name, said = type(error).__name__, first_line(error)
    if name in WITHOUT_DATA:
        hints = "".join(getattr(error, "__notes__", ()))  # of KnownValues
        return f"{WITHOUT_DATA[name]} ({said}){hints}"
    return f"{name}: {next((meant for text, meant in SAID.items() if text in said), said)}"


def _line_of(error: Exception, what: str) -> str:
    """Return the last line of the captured code in a traceback, and the line of a library that it called."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [f for f in frames if not any(part in f.filename for part in OURS)]
    if not theirs:
        return what
    own = [f for f in theirs if not any(part in f.filename for part in LIBRARIES)]
    inner = f"{theirs[-1].filename}:{theirs[-1].lineno}"
    return f"{own[-1].filename}:{own[-1].lineno}: in {inner}" if own and own[-1] is not theirs[-1] else inner


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, and the next where the first ends with a colon."""
    first, *more = (str(error).strip() or "no message").splitlines()
    return f"{first} {more[0].strip()}" if more and first.endswith(":") else first
