"""The program's version, as pip installed it."""

from importlib.metadata import PackageNotFoundError, version


def version_words() -> str:
    """Such as `0.1.0`; `not installed` of a checkout that pip never saw."""
    try:
        return version("stepsim")
    except PackageNotFoundError:
        return "not installed"
