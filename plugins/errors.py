"""The one exception a command line turns into a sentence and exit code 2."""


class UserError(Exception):
    """Bad input: one sentence with the offending values and the option or command that mends it."""
