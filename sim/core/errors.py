"""The one error that a person who wrote a bad input sees."""


class InputError(ValueError):
    """Something a user wrote is wrong: the message names file, line, key, what was found and what is allowed.

    Entry points print it on standard error, alone, and exit with code 2.
    """
