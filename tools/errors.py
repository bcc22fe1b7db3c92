"""Which errors are a user's or the outside world's, and what is said of them; all others are bugs."""

import errno

from store.errors import StoreError

OURS = ("bigscl", "store", "tools")
HINTS = {
    errno.ENOENT: "Check the path.",
    errno.ENOTDIR: "A part of the path is a file: check it.",
    errno.EISDIR: "A file is expected: check the path.",
    errno.EEXIST: "Choose another path.",
    errno.EACCES: "Choose another path, or ask for the right to read or write there.",
    errno.EPERM: "Choose another path, or ask for the right to read or write there.",
    errno.EROFS: "Choose another path: this file system is read-only.",
    errno.ENOSPC: "Free some space, then run the command again.",
    errno.EDQUOT: "Free some space, then run the command again.",
    errno.ENAMETOOLONG: "Choose a shorter name.",
}


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
    if error.errno is None or error.strerror is None:
        return str(error)
    hint = HINTS.get(error.errno, "Check the storage, then run the command again.")
    reason = f"{error.strerror.lower()}. {hint}"
    return reason if error.filename is None else f"{error.filename}: {reason}"
