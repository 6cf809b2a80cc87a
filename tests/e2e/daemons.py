"""A `spillway daemon` as tests and measurements have one: at a place of its own, asked over its socket."""

import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import typing

import harness


class Daemon:
    """A daemon at a place of its own, so that one of this machine's is left alone."""

    def __init__(self, processes, spillway, directory):
        self.processes, self.spillway = processes, spillway
        self.socket = pathlib.Path(directory) / "daemon.sock"
        self.process = None

    def command(self, *arguments):
        return [self.spillway.path, "daemon", *map(str, arguments)]

    def start(self, *arguments):
        """Starts it, and waits until it listens; what it said on its first lines."""
        pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        self.process = self.processes.start(self.command(*arguments), **pipes)
        said = []
        while not said or not said[-1].startswith("spillway: listening"):
            line = self.process.stderr.readline()
            assert line, f"it ended with status {self.process.wait(5)}: {said}"
            said.append(line)
        return "".join(said)

    @property
    def pid(self):
        return self.process.pid

    def kill(self):
        """Ends it as a crash would."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(10)
        self.process.stderr.close()

    def asked(self, **request):
        """A connection to the control socket over which this was asked, and nothing read yet."""
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(60)
        connection.connect(str(self.socket))
        connection.sendall(json.dumps(request).encode() + b"\n")
        return connection

    def ask(self, **request):
        """One request over the control socket; its answers, the last of which is not progress."""
        with contextlib.closing(self.asked(**request)) as connection:
            answers = []
            for line in connection.makefile():
                answers.append(json.loads(line))
                if "progress" not in answers[-1]:
                    return answers
        raise AssertionError(f"no answer to {request}: {answers}")

    def done(self, **request):
        """What it answers to a request that must succeed."""
        answer = self.ask(**request)[-1]
        assert "ok" in answer, answer
        return answer["ok"]


class Resources(typing.NamedTuple):
    """What a process has of the machine."""

    descriptors: int
    threads: int
    resident_kib: int
    memory_files_kib: int


def resources(pid):
    """What a long life must not cost: descriptors, threads, resident memory, and memory that only a descriptor holds, in KiB."""
    descriptors = pathlib.Path(f"/proc/{pid}/fd")
    held = 0
    for entry in descriptors.iterdir():
        with contextlib.suppress(OSError):
            held += entry.stat().st_blocks // 2 if "/memfd:" in os.readlink(entry) else 0
    kib = int(harness.status_field(pid, "VmRSS").split()[0])
    return Resources(len(os.listdir(descriptors)), int(harness.status_field(pid, "Threads")), kib, held)
