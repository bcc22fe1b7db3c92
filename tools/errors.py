"""Which errors are a user's or the outside world's, and what is said of them; all others are bugs."""

from bigscl import files
from bigscl.store import StoreError

OURS = ("bigscl", "store", "tools")


def explain(error: Exception) -> str | None:
    """What a user is told of an error, or None if it is a bug and its traceback must be seen.

    Our own code raises plain ValueError for mistakes of the user. Its subclasses in libraries (a JSON or
    Unicode error) mean that a reader did not check its file.
    """
    if isinstance(error, StoreError) or _is_our_value_error(error):
        return str(error)
    if isinstance(error, OSError):
        return _explain_os_error(error)
    if type(error).__module__.startswith("obstore"):
        reason = str(error).splitlines()[0]
        return f"the object store: {reason}. Check bucket, --endpoint, --region and credentials."
    return None


def _is_our_value_error(error: Exception) -> bool:
    ours = type(error).__module__.split(".")[0] in OURS
    return isinstance(error, ValueError) and (type(error) is ValueError or ours)


def _explain_os_error(error: OSError) -> str:
    told = files.explain(error)
    if told is None and error.errno is not None and error.filename is not None:
        told = f"{error.filename}: {error.strerror}. Check the path."
    return told or str(error)
