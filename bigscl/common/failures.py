"""The end of a command: errors in one line, and the exit code and reason of a rank for the launcher.

Errors of the user and of the outside world are explained in one line; all others are bugs.

Torch is not imported here, so that commands without ranks do not pay for it.
"""

import contextlib
import json
import multiprocessing
import os
import re
import sys
import time
from pathlib import Path
from typing import NoReturn

from bigscl.common import files
from bigscl.common.user_error import UserError

# What gloo and NCCL say when another rank is gone, or does not answer in time.
LOST = re.compile(
    r"third_party/gloo|Connection closed by peer|Connection reset by peer|Broken pipe|timed out|"
    r"NCCL|ncclRemoteError|ncclSystemError|[Ww]atchdog|connectFullMesh|Socket Timeout"
)
STOPPED = 75
"""Exit code of a run that a signal stopped before its end: start it again. EX_TEMPFAIL of sysexits.h."""
LAUNCH_FOLDER = "BIGSCL_LAUNCH"
"""Variable with the folder in which `bigscl.launch` looks for its ranks: one file each, named by process id,
which is empty until the rank writes its exit code."""
SECONDS_FOR_THE_FIRST = 3.0
"""How long a rank that lost the others waits, so that the rank which failed first is reported."""


def in_a_group() -> bool:
    """Return whether this process has joined other ranks."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return False
    return int(torch.distributed.get_world_size()) > 1


def lost_other_ranks(error: BaseException) -> bool:
    """Return whether an error says that this rank lost the connection to the others."""
    names = {kind.__name__ for kind in type(error).__mro__}
    distributed = names & {"DistError", "DistBackendError", "DistNetworkError", "DistStoreError"}
    return bool(distributed) or (isinstance(error, RuntimeError) and LOST.search(str(error)) is not None)


def report_to_launcher(text: str) -> None:
    """Give torch's launcher the reason: it prints that of the first rank which failed as its last words."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None:
        return
    extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
    content = json.dumps({"message": {"message": text, "extraInfo": extra}})
    with contextlib.suppress(OSError):  # the text is on the screen as well
        Path(path).write_text(content)


def join_launch() -> None:
    """Tell `bigscl.launch`, if it started this process, that signals may be sent to it from now on."""
    _write_to_launch("")


def end_in_launch(code: int) -> int:
    """Give `bigscl.launch` the exit code of this rank; return the code with which the rank is to end.

    A rank that stopped ends with 0 then: at any other code launchers print tracebacks, and end with 1.
    """
    return 0 if _write_to_launch(str(code)) and code == STOPPED else code


def _write_to_launch(text: str) -> bool:
    folder = os.environ.get(LAUNCH_FOLDER)
    if folder is None:
        return False
    try:
        Path(folder, str(os.getpid())).write_text(text)
    except OSError:  # bigscl.launch is gone, and the folder with it
        return False
    return True


def exit_now(code: int) -> NoReturn:
    """End this process and its loader workers now, whatever its other threads wait for.

    Destroying NCCL's group, as an ordinary exit does, waits for ranks that wait for this one. Forked workers
    have the sockets of the group open: the other ranks see that this one is gone when they are gone, too.
    """
    end_in_launch(code)
    for worker in multiprocessing.active_children():
        worker.kill()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a terminal that is gone
            stream.flush()
    os._exit(code)


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
    # Imported after an error, not before: zarr costs `bigscl --help` half of its time.
    from bigscl.store import StoreError

    return str(error) if isinstance(error, UserError | StoreError) else None


def _explain_os_error(error: OSError) -> str | None:
    told = files.explain(error)
    if told is None and error.errno is not None and error.filename is not None:
        return f"{error.filename}: {error.strerror}. Check the path."
    if told is None and (error.errno is None or isinstance(error, ConnectionError | TimeoutError)):
        return str(error)
    return told
