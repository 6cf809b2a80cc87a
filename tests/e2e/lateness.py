"""How late a thread gets a CPU that goes before all others: what is later than that, no program here is the cause of. The host of a
virtual machine may take a CPU away without counting it as stolen.

Run as a program it watches all CPUs, and answers each line with the most since the one before, in seconds.
"""

import contextlib
import mmap
import os
import struct
import subprocess
import sys
import time

EVERY_S = 0.01


class Lateness:
    """A witness in processes of its own: it must not wait for this one's interpreter."""

    def __enter__(self):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen([sys.executable, "-S", "-E", __file__], start_new_session=True, **pipes)
        self.take()
        return self

    def __exit__(self, *_):
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()

    def take(self):
        """The most since this was asked last, in seconds."""
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())


def watch(cpu, told, parent):
    """Writes the most into `told`, until whoever asks is gone."""
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    os.sched_setaffinity(0, {cpu})
    while os.getppid() == parent:
        began = time.monotonic()
        time.sleep(EVERY_S)
        late = time.monotonic() - began - EVERY_S
        if late > struct.unpack("d", told[:8])[0]:
            told[:8] = struct.pack("d", late)


def main():
    ourselves, told = os.getpid(), []
    for cpu in sorted(os.sched_getaffinity(0)):
        told.append(mmap.mmap(-1, mmap.PAGESIZE))
        if os.fork() == 0:
            sys.stdin.close()
            watch(cpu, told[-1], ourselves)
            os._exit(0)
    for _ in sys.stdin:
        print(max(struct.unpack("d", one[:8])[0] for one in told), flush=True)
        for one in told:
            one[:8] = bytes(8)


if __name__ == "__main__":
    main()
