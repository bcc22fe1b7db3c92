"""The error for what a user can correct; alone, so that store, bigscl and tools import it at no cost."""


class UserError(ValueError):
    """A mistake of the user's: the command ends with this message in one line, without a traceback."""
