"""Bad input: one line that names the remedy, status 2, and nobody is harmed."""

import json
import os
import pathlib
import subprocess

import pytest
from harness import REPOSITORY, eventually
from mechanics import Program, let_go, refused, state, traits

SIZES = ["", "x", "M", "-1M", "0", "1", "3M", "4095K", "0%", "101%", "-5%", "12Q", "99999999999999999999", "1e9", "1 M"]
POOLS = ["nosuch:", "nosuch://host:1", "http://example.org/", "local", "", ":", "local:?compress=nosuch", "local:?nosuch=1"]


@pytest.fixture
def target(processes, build):
    return Program(processes, [build("fill"), 32]).ready()


@pytest.mark.parametrize("size", SIZES)
def test_sizes(spillway, target, tmp_path, size):
    before, trace = traits(target.pid), tmp_path / "it ran"
    refused(spillway.cli("attach", target.pid, f"--local={size}"))
    refused(spillway.cli("run", f"--local={size}", "--", "touch", trace))
    assert not trace.exists()
    assert traits(target.pid) == before
    target.unharmed()


def test_size_below_the_floor_names_it(spillway, target):
    refused(spillway.cli("attach", target.pid, "--local", "1M"), "at least 4")


@pytest.mark.parametrize("pool", POOLS)
def test_pools(spillway, target, tmp_path, pool):
    before, trace = traits(target.pid), tmp_path / "it ran"
    refused(spillway.cli("attach", target.pid, f"--pool={pool}"))
    refused(spillway.cli("run", f"--pool={pool}", "--", "touch", trace))
    assert not trace.exists()
    assert traits(target.pid) == before
    target.unharmed()


def test_resize_to_nonsense_changes_nothing(spillway, target):
    attached = spillway.attach(target.pid, "8M")
    for size in ["1M", "x", "101%", "-3M"]:
        refused(spillway.cli("resize", "--", target.pid, size))
    assert spillway.find(target.pid)["budget_bytes"] == 8 << 20
    target.unharmed()
    let_go(attached)


def unused_pid():
    """A process id that nobody has."""
    return next(pid for pid in range(int(open("/proc/sys/kernel/pid_max").read()) - 2, 1, -1) if not os.path.exists(f"/proc/{pid}"))


def test_no_such_process(spillway):
    pid = unused_pid()
    refused(spillway.cli("attach", pid, "--local", "8M"), str(pid))
    refused(spillway.cli("resize", pid, "8M"), str(pid))
    refused(spillway.cli("detach", pid), str(pid))


@pytest.mark.parametrize("pid", ["0", "-1", "x", "99999999999999", "1.5", ""])
def test_what_is_no_process_id(spillway, pid):
    refused(spillway.cli("attach", "--local", "8M", "--", pid))


def test_processes_that_are_not_managed(spillway, target):
    refused(spillway.cli("resize", target.pid, "8M"), str(target.pid))
    refused(spillway.cli("detach", target.pid), str(target.pid))
    target.unharmed()


def test_zombie(processes, spillway):
    zombie = processes.start(["true"])
    eventually(lambda: state(zombie.pid) == "Z", "the zombie")
    refused(spillway.cli("attach", zombie.pid, "--local", "8M"))


def test_kernel_thread(spillway):
    try:
        name = pathlib.Path("/proc/2/comm").read_text()
    except FileNotFoundError:
        name = ""
    if name != "kthreadd\n":
        pytest.skip("kernel threads are not visible in this PID namespace")
    refused(spillway.cli("attach", 2, "--local", "8M"))


def test_already_adopted(spillway, target):
    attached = spillway.attach(target.pid, "8M")
    spillway.settled(target.pid)
    refused(spillway.cli("attach", target.pid, "--local", "16M"), "already")
    target.unharmed()
    let_go(attached)
    target.unharmed()


def test_program_under_run_is_already_adopted(processes, spillway, build):
    target = Program(processes, [build("fill"), 32], spillway, "8M").ready()
    target.unharmed()
    refused(spillway.cli("attach", target.pid, "--local", "16M"), "already")
    target.unharmed()
    target.tell("exit 0")
    assert target.status() == 0


def test_pager_is_no_target(spillway, target):
    attached = spillway.attach(target.pid, "8M")
    refused(spillway.cli("attach", attached.process.pid, "--local", "8M"))
    target.unharmed()
    let_go(attached)


def test_32_bit_program(processes, spillway, tmp_path):
    narrow = tmp_path / "narrow"
    source = REPOSITORY / "tests/programs/narrow.c"
    flags = ["-m32", "-O2", "-nostdlib", "-static", "-ffreestanding", "-fno-pic", "-fno-stack-protector"]
    subprocess.run(["cc", *flags, "-o", narrow, source], check=True, timeout=60)
    target = Program(processes, [narrow]).ready()
    before = traits(target.pid)
    refused(spillway.cli("attach", target.pid, "--local", "8M"), "32")
    assert traits(target.pid) == before
    target.tell("")
    assert target.line() == "OK"
    # Where one is started among others it runs as it is, unmanaged.
    done = spillway.run([narrow], "8M", "-q", stdin="\n")
    assert (done.status, done.out) == (0, "READY\nOK\n"), done.err


@pytest.mark.parametrize(
    "words",
    ["", "nosuch", "run", "run --", "run --nosuch -- true", "attach", "attach --local 8M", "resize 1", "detach", "ps --nosuch"],
)
def test_command_lines(spillway, words):
    refused(spillway.cli(*words.split()))


def test_stats_file_that_cannot_be_written(spillway, target, tmp_path):
    trace = tmp_path / "it ran"
    refused(spillway.cli("run", "--stats", "/no/such/directory/stats", "--", "touch", trace))
    refused(spillway.cli("attach", target.pid, "--stats", "/no/such/directory/stats"))
    assert not trace.exists()
    target.unharmed()


def test_output_that_cannot_be_written_is_told(spillway):
    """A listing that a full disk had cut off came with status 0."""
    with open("/dev/full", "w") as full:
        for command in [("ps", "--json"), ("doctor",), ("sim", "cost")]:
            done = spillway.cli(*command, stdout=full)
            assert done.returncode == 1 and "the output could not be written" in done.stderr, (command, done.stderr)


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_statistics_where_the_output_goes(spillway, tmp_path, stream):
    """They took the place of all that the program had written."""
    place = tmp_path / "output"
    redirected = ">" if stream == "stdout" else "2>"
    program = f"echo hello >&{1 if stream == 'stdout' else 2}"
    command = f'"$0" run -q --stats /dev/{stream} -- sh -c "{program}" {redirected} "$1"'
    subprocess.run(["sh", "-c", command, spillway.path, place], check=True, timeout=30)
    hello, statistics = place.read_text().split("\n", 1)
    assert hello == "hello" and json.loads(statistics)["faults"] == 0
