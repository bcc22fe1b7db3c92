"""Which errors end a command in one line: those of the user and of the outside world. All others are bugs."""

import dis

from bigscl import files
from bigscl.processes.failures import lost_other_ranks


def explain(error: Exception) -> str | None:
    """Return what the user is told about an error, or None for a bug, which keeps its traceback.

    Our own code raises a plain ValueError, or a subclass of its own, for the user's mistakes. A ValueError
    that a library or the user's network raises, or an operation that failed, keeps its traceback. So do the
    subclasses of libraries (a JSON or Unicode error): one of our parsers did not check its file.
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
    is_ours = _is_of_bigscl(type(error).__module__) or (type(error) is ValueError and _raised_by_us(error))
    return str(error) if is_ours and isinstance(error, _kinds()) else None


def _is_of_bigscl(module: str) -> bool:
    return module.split(".")[0] == "bigscl"


def _raised_by_us(error: Exception) -> bool:
    """Return whether a `raise` in our own code raised the error, not an operation or a call that failed."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return False
    frame = trace.tb_frame
    operation = frame.f_code.co_code[trace.tb_lasti]
    # The name of a module that `python -m` runs is `__main__`.
    module = frame.f_globals.get("__package__") or frame.f_globals.get("__name__") or ""
    return _is_of_bigscl(module) and dis.opname[operation] == "RAISE_VARARGS"


def _kinds() -> tuple[type[Exception], ...]:
    # Imported after an error, not before: zarr costs `bigscl --help` half of its time.
    from bigscl.store import StoreError

    return ValueError, StoreError


def _explain_os_error(error: OSError) -> str | None:
    told = files.explain(error)
    if told is None and error.errno is not None and error.filename is not None:
        return f"{error.filename}: {error.strerror}. Check the path."
    if told is None and (error.errno is None or isinstance(error, ConnectionError | TimeoutError)):
        return str(error)
    return told
