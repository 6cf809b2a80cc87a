"""The harness itself, where a mistake of its own would look like one of the pager's."""

import subprocess
import threading

import pytest
from harness import Sampler, anonymous_bytes, children, eventually, executable, session_members, status_field, tree

LOOKS = [children, tree, executable, anonymous_bytes, session_members, lambda pid: status_field(pid, "State")]


@pytest.mark.parametrize("look", LOOKS)
def test_looking_at_processes_that_vanish(look):
    # One in twelve vanished in the middle of a look that did not expect it: all hundred hide that once in 5000 runs.
    for _ in range(100):
        process = subprocess.Popen(["true"])
        reaper = threading.Thread(target=process.wait)
        reaper.start()
        while reaper.is_alive():
            look(process.pid)
        reaper.join()
    look(process.pid)


def test_a_process_that_is_gone_has_no_children():
    process = subprocess.Popen(["true"])
    process.wait()
    assert children(process.pid) == [] and tree(process.pid) == [process.pid]


def test_the_sampler_outlives_its_process():
    process = subprocess.Popen(["sleep", "60"])
    sampler = Sampler(process.pid, every=0.001)
    sampler.start()
    eventually(lambda: sampler.peak_bytes > 0, "a sample")
    process.kill()
    process.wait()
    sampler.done.wait(0.05)
    assert sampler.is_alive()
    sampler.done.set()
    sampler.join()
    assert sampler.peak_bytes > 0
