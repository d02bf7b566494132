"""The program's version, as pip installed it."""

from importlib.metadata import PackageNotFoundError, version


def version_words() -> str:
    """The installed version, such as `0.1.0`, or `not installed` for a checkout that pip has not installed."""
    try:
        return version("stepsim")
    except PackageNotFoundError:
        return "not installed"
