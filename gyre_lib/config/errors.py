"""The one error for a user's mistake."""


class InputError(ValueError):
    """Bad usage or bad input: the command line prints its text as one line and exits with code 2.

    The text names the field, file or row at fault and says what would be right.
    """
