"""The errors of files that describe hardware. It imports nothing, so that a command line can know them for no time."""


class PresetError(ValueError):
    """A file of a GPU or machine is wrong: the message names file, key, what was found and what is allowed."""
