"""Define the errors of files that describe hardware. The module imports nothing, so that commands start quickly."""


class PresetError(ValueError):
    """Report a wrong file of a GPU or machine: its name, the key, the value found and the values allowed."""
