"""Commands that verbs start: their failures, their output, and that none is left behind."""

import threading
import time

import psutil
import pytest

from bigscl.tools.shared.running import Runner


def python(code):
    return ("python", "-c", code)


def test_output_goes_to_the_log_and_settings_to_the_environment(tmp_path):
    log = tmp_path / "run" / "log.txt"
    with Runner() as runner:
        for _ in range(2):
            runner.run(python("import os; print(os.environ['PLACE'])"), log=log, variables={"PLACE": "7"})
    assert log.read_text() == "7\n7\n"


def test_a_failure_names_the_command_and_its_log(tmp_path):
    with Runner() as runner, pytest.raises(ValueError, match=r"python -c 'exit\(3\)'.*log\.txt"):
        runner.run(python("exit(3)"), log=tmp_path / "log.txt")


def test_a_runner_that_is_left_ends_what_its_commands_have_started(tmp_path):
    note = tmp_path / "pid"
    sleeper = (
        "import os, sys, time; print(os.getpid(), file=open(sys.argv[1], 'w'), flush=True); time.sleep(99)"
    )
    starter = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {sleeper!r}, {str(note)!r}])"
    ended = []

    def work():
        try:
            runner.run(python(starter))
        except KeyboardInterrupt:
            ended.append("interrupted")

    with Runner() as runner:
        thread = threading.Thread(target=work)
        thread.start()
        while not (note.exists() and note.read_text()):
            time.sleep(0.01)
    thread.join(30)
    assert ended == ["interrupted"]
    pid = int(note.read_text())
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_stopped_runner_starts_nothing(tmp_path):
    runner = Runner()
    runner.stop()
    with pytest.raises(KeyboardInterrupt):
        runner.run(python(f"open({str(tmp_path / 'made')!r}, 'w')"))
    assert not (tmp_path / "made").exists()
