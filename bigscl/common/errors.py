"""Which errors end a command in one line: those of the user and of the outside world. All others are bugs."""

from bigscl.common import files
from bigscl.common.failures import lost_other_ranks
from bigscl.common.user_error import UserError


def explain(error: Exception) -> str | None:
    """Return what the user is told about an error, or None for a bug, which keeps its traceback.

    Our own code raises a UserError or a StoreError for what the user can correct. Any other ValueError keeps
    its traceback: a library or the user's network raised it, or one of our parsers did not check its file.
    """
    if isinstance(error, OSError):
        return _explain_os_error(error)
    if lost_other_ranks(error):
        reason = str(error).strip().splitlines()[0]
        return (
            f"this rank lost the connection to the others ({reason}). One of them ended or did not answer in "
            f"time: its own message says why. Run the same command again to resume."
        )
    if type(error).__module__.startswith("obstore"):
        reason = str(error).splitlines()[0]
        return f"the object store: {reason}. Check bucket, endpoint, region and credentials."
    if isinstance(error, UserError) or _is_of_the_store(error):
        return str(error)
    return None


def _is_of_the_store(error: Exception) -> bool:
    # Imported after an error, not before: zarr costs `bigscl --help` half of its time.
    from bigscl.store import StoreError

    return isinstance(error, StoreError)


def _explain_os_error(error: OSError) -> str | None:
    told = files.explain(error)
    if told is None and error.errno is not None and error.filename is not None:
        return f"{error.filename}: {error.strerror}. Check the path."
    if told is None and (error.errno is None or isinstance(error, ConnectionError | TimeoutError)):
        return str(error)
    return told
