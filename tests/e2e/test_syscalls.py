"""System calls on evicted memory, locked memory, signals, and ends that come at the wrong moment."""

import fcntl
import json
import os
import pathlib
import pty
import re
import signal
import subprocess
import termios
import time

import pytest
from harness import MIB, UNMANAGED_BYTES, anonymous_bytes, children, eventually, executable, status_field
from mechanics import Program, gone, let_go, running, squeeze, state

# MCL_CURRENT, MCL_FUTURE, MCL_ONFAULT.
CURRENT, FUTURE, ONFAULT = 1, 2, 4
CALLS = (
    "files vectors direct io_uring pinned pipes sockets getrandom process_vm proc_mem futex mlock mincore structs stacks exec refused_munmap".split()
)


@pytest.fixture
def fill(build):
    return build("fill")


@pytest.mark.parametrize("call", CALLS)
def test_calls_into_evicted_memory(spillway, build, tmp_path, call):
    done = spillway.run([build("syscalls"), call], "8M", cwd=tmp_path, timeout=40).must_succeed()
    assert json.loads(done.out)["cold_pages"] >= 64, done.out
    assert done.stats["fetched_pages"] > 0, done.stats


def test_mappings_grow_in_place_while_they_are_registered(spillway, build):
    """What appears and grows at once is one mapping to its program, and so it must be to the kernel: mremap takes one."""
    done = spillway.run([build("grow"), 6, 16], "4M", timeout=40).must_succeed()
    assert int(done.out.split()[-1]) > 10000, done.out


def test_mappings_grow_in_place_while_they_are_adopted_and_let_go(processes, spillway, build):
    target = Program(processes, [build("grow"), "9", "16"]).ready()
    rounds, until = 0, time.monotonic() + 6  # well before the program ends: it is not to end between an attach and its `ps`
    while time.monotonic() < until:
        attached = spillway.attach(target.pid, "4M")
        time.sleep(0.03)
        let_go(attached)
        rounds += 1
    assert target.line().startswith("OK") and target.status() == 0 and rounds >= 3


def test_ignored_signals_stay_ignored_the_c_librarys_own_too(native, spillway, build):
    """glibc installs a handler for its signal 33 with the first thread; whoever ignored it wants it ignored after exec."""
    show = ["sed", "-n", "/^Sig[BIC]/p", "/proc/self/status"]
    alone = native.run([build("ignoring"), *show]).must_succeed()
    assert "SigIgn:\tfffffffffffbfeff" in alone.out, alone.out  # all but SIGKILL and SIGSTOP
    under = native.run([build("ignoring"), spillway.path, "run", "-q", "--", *show]).must_succeed()
    assert under.out == alone.out


def test_calls_natively(native, build, tmp_path):
    for call in CALLS:
        done = native.run([build("syscalls"), call, "--native"], cwd=tmp_path).must_succeed()
        assert json.loads(done.out)["test"] == call


def test_mlock_of_evicted_memory_keeps_it_in(processes, spillway, fill):
    target = Program(processes, [fill, 64], spillway, "32M").ready()
    squeeze(spillway, target.pid, "12M")
    target.ask("mlock 100 512")
    squeeze(spillway, target.pid, "8M")
    target.unharmed()
    locked = pathlib.Path(f"/proc/{target.pid}/smaps_rollup").read_text()
    assert int(re.search(r"^Locked: +(\d+) kB", locked, re.M).group(1)) == 2048, locked
    target.ask("munlock 100 512")
    target.unharmed()
    target.tell("exit 0")
    assert target.status() == 0


@pytest.mark.parametrize("flags", [CURRENT, CURRENT | FUTURE, CURRENT | ONFAULT, CURRENT | FUTURE | ONFAULT])
def test_a_program_that_locks_all_of_its_memory_keeps_it_in(processes, spillway, fill, flags):
    """What is ours there is locked with it, so that what was captured before could not be dropped, and took the place of what came next."""
    target = Program(processes, [fill, 32], spillway, "16M").ready()
    squeeze(spillway, target.pid, "8M")
    target.ask(f"mlockall {flags}")
    target.unharmed()
    spillway.resize(target.pid, "4M")
    for _ in range(30):
        time.sleep(0.1)
        assert spillway.find(target.pid)["local_bytes"] >= 32 * MIB
    # A tenth of it is zeros, of which the kernel counts none that is its own page of zeros.
    assert spillway.find(target.pid)["local_bytes"] + MIB >= anonymous_bytes(target.pid) >= 28 * MIB
    target.unharmed()
    target.ask("munlockall")
    squeeze(spillway, target.pid, "8M")
    assert anonymous_bytes(target.pid) <= 8 * MIB + UNMANAGED_BYTES
    target.unharmed()
    target.tell("exit 0")
    assert target.status() == 0


@pytest.mark.parametrize("flags", [FUTURE, FUTURE | ONFAULT])
def test_a_program_that_locks_what_it_maps_from_now_on_is_adopted(processes, spillway, fill, flags):
    """The area that captures go through is locked, too, then, and full."""
    target = Program(processes, [fill, 32]).ready()
    target.ask(f"mlockall {flags}")
    spillway.attach(target.pid, "16M")
    squeeze(spillway, target.pid, "8M")
    assert anonymous_bytes(target.pid) <= 8 * MIB + UNMANAGED_BYTES
    target.unharmed()
    target.tell("exit 0")
    assert target.status() == 0


def test_command_line_is_shown_when_its_page_could_be_evicted(processes, spillway, fill):
    """/proc/PID/cmdline is read from the program's stack, and the kernel does not wait for a pager there."""
    target = Program(processes, [fill, 64]).ready()
    before = cmdline(target.pid)
    spillway.attach(target.pid, "16M")
    squeeze(spillway, target.pid)
    assert cmdline(target.pid) == before
    target.unharmed()


# ---- stopping and continuing


def test_stopped_target_does_not_hold_its_pager_up(processes, spillway, fill):
    target = Program(processes, [fill, 64]).ready()
    attached = spillway.attach(target.pid, "32M")
    spillway.settled(target.pid)
    os.kill(target.pid, signal.SIGSTOP)
    eventually(lambda: state(target.pid) == "T", "the target to stop")
    spillway.resize(target.pid, "8M")
    eventually(lambda: spillway.find(target.pid)["budget_bytes"] == 8 << 20, "the new budget")
    time.sleep(0.5)
    assert state(target.pid) == "T", "something woke the target"
    os.kill(target.pid, signal.SIGCONT)
    spillway.settled(target.pid)
    target.unharmed()
    let_go(attached)
    target.unharmed()


def test_stop_and_continue_while_faults_are_served(processes, spillway, fill):
    target = Program(processes, [fill, 64]).ready()
    spillway.attach(target.pid, "12M")
    target.ask("hammer 2")
    for _ in range(20):
        os.kill(target.pid, signal.SIGSTOP)
        time.sleep(0.02)
        os.kill(target.pid, signal.SIGCONT)
        time.sleep(0.03)
    target.unharmed()


def test_run_stops_and_continues_with_its_target(processes, spillway, fill):
    target = Program(processes, [fill, 48], spillway, "12M").ready()
    pid, front = target.pid, target.process.pid
    os.kill(pid, signal.SIGSTOP)
    eventually(lambda: state(front) == "T", "`spillway run` to stop with its target")
    os.kill(front, signal.SIGCONT)
    eventually(lambda: state(pid) != "T", "the target to be continued")
    target.unharmed()


def test_keys_on_a_terminal(processes, spillway, fill):
    """Ctrl-Z, fg and Ctrl-C in an interactive shell do to `spillway run` what they do to the program alone."""
    ours, theirs = pty.openpty()
    shell = processes.start(
        ["bash", "--norc", "--noprofile", "-i"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=os.environ | {"PS1": "$ "},
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(theirs)
    said = b""

    def until(text, timeout=15):
        nonlocal said
        deadline = time.monotonic() + timeout
        while text not in said:
            assert time.monotonic() < deadline, f"no {text!r} in {said!r}"
            os.set_blocking(ours, False)
            try:
                said += os.read(ours, 65536)
            except BlockingIOError:
                time.sleep(0.02)
        said = said.split(text, 1)[1]

    os.write(ours, f"stty -echo; {spillway.path} run -q --local 12M -- {fill} 48\n".encode())
    until(b"READY")
    os.write(ours, b"verify\n")
    until(b"OK")
    os.write(ours, b"\x1a")
    until(b"Stopped")
    os.write(ours, b"fg\n")
    until(b"run -q")
    os.write(ours, b"verify\n")
    until(b"OK")
    os.write(ours, b"\x03")
    until(b"$ ")
    os.write(ours, b'echo "status=$?"\n')
    until(b"status=130")
    os.write(ours, b"exit\n")
    shell.wait(10)
    os.close(ours)


# ---- ends


def pager_of(spillway, front):
    """The pager process that a `spillway run` has started."""
    entry = next((each for each in spillway.ps() if each["front_pid"] == front), None)
    return entry and entry["pager_pid"]


def test_killed_in_the_middle_of_faults(processes, spillway, fill):
    for wait in [0.01, 0.05, 0.1, 0.2, 0.3]:
        target = Program(processes, [fill, 48], spillway, "8M").ready()
        pager = eventually(lambda: pager_of(spillway, target.process.pid), "the pager in `spillway ps`")
        target.ask("hammer 3")
        time.sleep(wait)
        os.kill(target.pid, signal.SIGKILL)
        assert target.status(10) == 137
        gone(pager)


def test_killed_in_the_middle_of_faults_when_attached(processes, spillway, fill):
    for wait in [0.02, 0.1]:
        target = Program(processes, [fill, 48]).ready()
        attached = spillway.attach(target.pid, "8M")
        target.ask("hammer 3")
        time.sleep(wait)
        os.kill(target.pid, signal.SIGKILL)
        assert target.status(10) == -signal.SIGKILL
        assert attached.finish(timeout=10).status == 0


def test_killed_before_anything_happened(processes, spillway):
    target = Program(processes, ["sleep", "60"], spillway, "8M")
    os.kill(target.pid, signal.SIGKILL)
    assert target.status(10) == 137


def test_exit_during_eviction(processes, spillway, fill):
    for status in range(4):
        target = Program(processes, [fill, 96], spillway, "64M").ready()
        target.ask("rewrite")
        spillway.resize(target.pid, "4M")
        time.sleep(0.02 * status)
        target.tell(f"exit {status}")
        assert target.status(10) == status


def test_exit_during_eviction_when_attached(processes, spillway, fill):
    for status in range(3):
        target = Program(processes, [fill, 96]).ready()
        attached = spillway.attach(target.pid, "4M")
        time.sleep(0.02 * status)
        target.tell(f"exit {status}")
        assert target.status(10) == status
        assert attached.finish(timeout=10).status == 0


@pytest.mark.parametrize("signal_name", ["TERM", "INT", "HUP", "SEGV", "USR1"])
def test_status_of_a_signal_s_victim(spillway, signal_name):
    number = getattr(signal, "SIG" + signal_name)
    done = spillway.run(["sh", "-c", f"kill -{signal_name} $$; sleep 5"], "8M")
    assert done.status == 128 + number, done.err


def test_status_and_streams_are_the_program_s_own(spillway):
    done = spillway.run(["sh", "-c", "cat; echo problem >&2; exit 7"], "8M", "-q", stdin="words\n")
    assert (done.status, done.out, done.err) == (7, "words\n", "problem\n")


def test_signals_sent_to_run_reach_the_program(processes, spillway):
    script = 'trap "echo got it; exit 9" TERM; echo READY; while :; do sleep 0.05; done'
    target = Program(processes, ["sh", "-c", script], spillway, "8M").ready()
    target.process.send_signal(signal.SIGTERM)
    assert target.line() == "got it"
    assert target.status() == 9


def test_a_program_that_is_not_there(spillway):
    done = spillway.cli("run", "--local", "8M", "--", "/no/such/program")
    assert done.returncode == 127 and len(done.stderr.splitlines()) == 1, done.stderr


def test_summary_is_one_line_and_q_silences_it(spillway, fill):
    told = spillway.run([fill, 32, "--once"], "8M").must_succeed()
    assert len(told.err.splitlines()) == 1, told.err
    quiet = spillway.run([fill, 32, "--once"], "8M", "-q").must_succeed()
    assert quiet.err == ""


# ---- pagers that die


def test_pager_killed_under_run_takes_the_program_with_it(processes, spillway, fill):
    target = Program(processes, [fill, 48], spillway, "8M").ready()
    pid = target.pid
    pager = eventually(lambda: pager_of(spillway, target.process.pid), "the pager in `spillway ps`")
    target.ask("hammer 2")
    os.kill(pager, signal.SIGKILL)
    gone(pid)
    assert target.status() == 70
    assert target.lines.get(timeout=5) is None, "it said something with its memory gone"


def test_run_killed_takes_the_program_with_it(processes, spillway, fill):
    target = Program(processes, [fill, 48], spillway, "8M").ready()
    pid = target.pid
    pager = eventually(lambda: pager_of(spillway, target.process.pid), "the pager in `spillway ps`")
    os.kill(target.process.pid, signal.SIGKILL)
    gone(pid)
    gone(pager)


def test_idle_program_dies_with_its_pager_too(processes, spillway, fill):
    """Asleep, with a child of its own: nobody faults, so nobody would notice."""
    target = Program(processes, ["sh", "-c", f"{fill} 32; sleep 60"], spillway, "8M").ready()
    pid = target.pid
    below = eventually(lambda: children(pid), "the child of the shell")
    pager = eventually(lambda: pager_of(spillway, target.process.pid), "the pager in `spillway ps`")
    os.kill(pager, signal.SIGKILL)
    for each in [pid, *below]:
        gone(each)
    assert target.status() == 70


def test_pager_killed_under_attach_stops_the_target_instead_of_zeros(processes, spillway, fill):
    target = Program(processes, [fill, 64]).ready()
    attached = spillway.attach(target.pid, "8M")
    spillway.settled(target.pid)
    attached.process.kill()
    attached.process.wait(5)
    target.tell("verify")
    time.sleep(2)
    assert target.lines.empty(), f"a target without its pager said {target.lines.get()}"
    assert running(target.pid)
    os.kill(target.pid, signal.SIGKILL)
    assert target.status(5) == -signal.SIGKILL


@pytest.mark.alone
def test_nothing_is_left_of_the_runs_above(spillway):
    """Pagers end with their targets: none of this binary's may be about."""
    ours = str(spillway.path)

    def left():
        return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if executable(pid) == ours and b"__pager" in cmdline(pid)]

    eventually(lambda: not left(), "pagers to end with their targets", 10)


def cmdline(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_tracers_of_a_managed_target_live_with_it(processes, spillway, fill, need):
    """strace after us is allowed: it stops threads, and the target goes on."""
    need("strace")
    target = Program(processes, [fill, 48]).ready()
    attached = spillway.attach(target.pid, "8M")
    spillway.settled(target.pid)
    strace = processes.start(["strace", "-o", "/dev/null", "-p", target.pid], stderr=subprocess.DEVNULL)
    target.unharmed()
    strace.send_signal(signal.SIGINT)
    strace.wait(10)
    target.unharmed()
    let_go(attached)
    target.unharmed()


def test_a_debugger_keeps_the_target_managed(processes, spillway, fill, need):
    """What has our thread in it cannot be let go: the thread stayed for ever, and nobody could adopt the process again."""
    need("gdb")
    target = Program(processes, [fill, 48]).ready()
    attached = spillway.attach(target.pid, "8M")
    spillway.settled(target.pid)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    gdb = processes.start(["gdb", "-q", "-nx", "-p", target.pid], **pipes)
    tasks = pathlib.Path(f"/proc/{target.pid}/task")
    eventually(lambda: {status_field(task.name, "TracerPid") for task in tasks.iterdir()} == {str(gdb.pid)}, "gdb to have all threads")
    done = spillway.cli("detach", target.pid)
    assert done.returncode == 1 and "gdb" in done.stderr and "have that detach first" in done.stderr, done.stderr
    assert spillway.find(target.pid)
    gdb.communicate(b"detach\nquit\n", 20)
    target.unharmed()
    spillway.detach(target.pid)
    attached.process.wait(10)
    assert len(list(tasks.iterdir())) == 1
    target.unharmed()
    let_go(spillway.attach(target.pid, "8M"))
    target.unharmed()
