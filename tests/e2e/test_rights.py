"""What the user's rights or the kernel do not allow: works, or is refused in one line with the remedy, before anything starts.

No right is taken from or given to this machine: users, capabilities and devices are those of private copies and mount
namespaces.
"""

import contextlib
import itertools
import json
import os
import pathlib
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import time

import pytest
from harness import PIPES, Running, eventually, tree
from mechanics import Program, has_agent, refused, state, status_field, threads, traits

NOBODY = 65534
CAPABILITIES = "cap_sys_ptrace,cap_ipc_lock,cap_sys_nice+ep"
# All features of Linux 6.8 but MOVE.
FEATURES_WITHOUT_MOVE = "ffff"


class User:
    """Runs copies of the binary and of a program as a user without privileges, in a directory of that user."""

    def __init__(self, directory, setpriv, processes):
        self.directory, self.processes = directory, processes
        self.rights = [setpriv, f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--inh-caps=-all"]
        self.binary, self.fill = os.path.join(directory, "spillway"), os.path.join(directory, "fill")
        self.environment = os.environ | {"XDG_RUNTIME_DIR": directory}
        self.namespace = []

    def give_capabilities(self, setcap, but=None):
        names = CAPABILITIES.replace(f",{but}", "") if but else CAPABILITIES
        subprocess.run([setcap, names, self.binary], check=True, timeout=20)

    def give_device(self):
        """From now on commands see a /dev/userfaultfd that everyone may open."""
        node = os.path.join(self.directory, "userfaultfd")
        os.mknod(node, stat.S_IFCHR, os.stat("/dev/userfaultfd").st_rdev)
        os.chmod(node, 0o666)
        self.namespace = in_namespace(f"mount --bind {shlex.quote(node)} /dev/userfaultfd")

    def words(self, *argv):
        return [*self.namespace, *self.rights, *map(str, argv)]

    def cli(self, *arguments):
        """Runs `spillway` to its end."""
        words = self.words(self.binary, *arguments)
        return subprocess.run(words, capture_output=True, text=True, timeout=30, stdin=subprocess.DEVNULL, cwd="/", env=self.environment)

    def program(self):
        """A process of this user that holds 32 MiB."""
        return Program(self.processes, self.words(self.fill, 32), cwd="/").ready()

    def checks(self):
        """What `spillway doctor` says, by the checks' names."""
        return {check["name"]: check for check in json.loads(self.cli("doctor", "--json").stdout)}

    def refused_everywhere(self, *words):
        """That `run` starts nothing and `attach` changes nothing."""
        trace = os.path.join(self.directory, "it ran")
        refused(self.cli("run", "--local", "8M", "--", "touch", trace), *words)
        assert not os.path.exists(trace)
        target = self.program()
        before = traits(target.pid)
        refused(self.cli("attach", target.pid, "--local", "8M"), *words)
        assert traits(target.pid) == before
        target.unharmed()


def in_namespace(script):
    """What comes before a command that is to run in a mount namespace of its own, prepared by `script`."""
    return ["unshare", "--mount", "sh", "-ec", f'{script}; exec "$@"', "sh"]


@pytest.fixture
def user(processes, spillway, build, need):
    setpriv, _ = need("setpriv", "unshare")
    directory = tempfile.mkdtemp()  # pytest's own directories are closed to other users
    os.chown(directory, NOBODY, NOBODY)
    user = User(directory, setpriv, processes)
    shutil.copy(spillway.path, user.binary)
    shutil.copy(build("fill"), user.fill)
    for path in (user.binary, user.fill):
        os.chmod(path, 0o755)
    yield user
    shutil.rmtree(directory)


@pytest.fixture
def setcap(need):
    return need("setcap")[0]


@pytest.fixture
def target(processes, build):
    return Program(processes, [build("fill"), 32]).ready()


def sysctl_allows_everyone():
    with open("/proc/sys/vm/unprivileged_userfaultfd") as sysctl:
        return sysctl.read().strip() == "1"


without_sysctl = pytest.mark.skipif(sysctl_allows_everyone(), reason="vm.unprivileged_userfaultfd is 1: everyone may have a userfaultfd")


@pytest.mark.parametrize("capable", [False, True])
def test_processes_of_others(user, target, capable, setcap):
    if capable:
        user.give_capabilities(setcap)
        user.give_device()
    before = traits(target.pid)
    for command in [["attach", target.pid, "--local", "8M"], ["detach", target.pid], ["resize", target.pid, "8M"]]:
        refused(user.cli(*command), str(target.pid))
    assert traits(target.pid) == before
    target.unharmed()


@without_sysctl
def test_no_right_at_all(user):
    checks = user.checks()
    assert not checks["userfaultfd"]["ok"] and "vm.unprivileged_userfaultfd" in checks["userfaultfd"]["remedy"]
    assert not checks["privileges"]["ok"] and "setcap" in checks["privileges"]["remedy"]
    user.refused_everywhere("userfaultfd", "root")


def test_device_without_capability(user):
    user.give_device()
    checks = user.checks()
    assert checks["userfaultfd"]["ok"] and not checks["privileges"]["ok"]
    user.refused_everywhere("CAP_SYS_PTRACE", "setcap")


@without_sysctl
def test_capability_without_device(user, setcap):
    """The program that `run` starts does not inherit what our binary's file gives: nothing may start unmanaged."""
    user.give_capabilities(setcap)
    checks = user.checks()
    assert checks["privileges"]["ok"] and checks["memlock"]["ok"]
    assert not checks["userfaultfd"]["ok"] and "/dev/userfaultfd" in checks["userfaultfd"]["remedy"]
    user.refused_everywhere("/dev/userfaultfd")


def test_capability_and_device(user, setcap):
    """README.md, "Without root": all that is needed; programs that are run have none of it."""
    user.give_capabilities(setcap)
    user.give_device()
    checks = user.checks()
    assert [name for name, check in checks.items() if not check["ok"]] == ["seccomp"]

    stats = os.path.join(user.directory, "stats")
    words = user.words(user.binary, "run", "--local", "8M", "--stats", stats, "--", user.fill, 32)
    program = Program(user.processes, words, cwd="/", env=user.environment).ready()

    def target():
        """Once there is something to fetch."""
        (found,) = json.loads(user.cli("ps", "--json").stdout) or [None]
        return found if found and found["evicted_pages"] > 1000 else None

    pid = eventually(target, "pages to leave")["pid"]
    program.unharmed()
    assert int(status_field(pid, "CapEff"), 16) == 0
    program.tell("exit 3")
    assert program.status() == 3
    counters = json.load(open(stats))
    assert counters["evicted_pages"] > 0 and counters["fetched_pages"] > 0, counters


# Where every CPU is busy all stay out of that class.
@pytest.mark.alone
@pytest.mark.parametrize("lacks", [None, "cap_sys_nice"])
def test_the_idle_class_is_for_who_may_leave_it(user, setcap, lacks):
    """Without that right the fault thread stayed in it where other programs wanted its CPU: accesses took 690 us instead of 12."""
    user.give_capabilities(setcap, but=lacks)
    user.give_device()
    assert user.checks()["priority"]["ok"] == (lacks is None)
    words = user.words(user.binary, "run", "-q", "--local", "8M", "--", user.fill, 32)
    program = Program(user.processes, words, cwd="/", env=user.environment).ready()
    seen = {"faults": set(), "reader": set()}

    def both():
        program.unharmed()
        for thread, name in [each for pid in tree(program.process.pid) for each in threads(pid)]:
            if name in seen:
                seen[name].add(os.sched_getscheduler(thread))
        return all(os.SCHED_IDLE in classes for classes in seen.values())

    if lacks:
        assert not any(both() for _ in range(20))
        assert seen == {"faults": {os.SCHED_OTHER}, "reader": {os.SCHED_OTHER}}
    else:
        eventually(both, "both threads in the idle class")


def test_adoption_with_capability_and_device(user, setcap):
    user.give_capabilities(setcap)
    user.give_device()
    target = user.program()
    before = traits(target.pid)
    words = user.words(user.binary, "attach", target.pid, "--local", "8M")
    attached = Running(user.processes.start(words, cwd="/", env=user.environment, **PIPES))

    def evicted():
        assert attached.process.poll() is None, attached.process.stderr.read()
        return [each for each in json.loads(user.cli("ps", "--json").stdout) if each["pid"] == target.pid and each["evicted_pages"] > 0]

    eventually(evicted, "pages to leave", every=0.1)
    target.unharmed()
    detached = user.cli("detach", target.pid)
    assert detached.returncode == 0, detached.stderr
    attached.finish(timeout=30).must_succeed()
    assert traits(target.pid) == before
    target.unharmed()


def test_a_stopped_program_is_let_go(user, setcap):
    """Without CAP_SYS_ADMIN nobody traces the agent, which stops with its process: it was waited for when it was told something then."""
    user.give_capabilities(setcap)
    user.give_device()
    target = user.program()
    attached = Running(user.processes.start(user.words(user.binary, "attach", target.pid, "--local", "16M"), cwd="/", env=user.environment, **PIPES))
    eventually(lambda: traits(target.pid)["registered"], "it to be adopted")
    eventually(lambda: any(each["evicted_pages"] > 3000 for each in json.loads(user.cli("ps", "--json").stdout)), "pages to leave", every=0.1)
    os.kill(target.pid, signal.SIGSTOP)
    assert user.cli("resize", target.pid, "8M").returncode == 0
    time.sleep(0.05)
    detached = user.cli("detach", target.pid)
    assert detached.returncode == 0, detached.stderr
    attached.finish(timeout=30).must_succeed()
    os.kill(target.pid, signal.SIGCONT)
    assert not has_agent(target.pid)
    target.unharmed()


@pytest.mark.parametrize("pager", ["attach", "daemon"])
def test_one_that_is_stopped_while_its_pages_leave_is_let_go(user, setcap, pager):
    """What its agent had begun was waited for, until somebody continued it."""
    user.give_capabilities(setcap)
    user.give_device()
    target = user.program()

    def begun(*words):
        return Running(user.processes.start(user.words(user.binary, *words), cwd="/", env=user.environment, **PIPES))

    if pager == "daemon":
        socket_path = pathlib.Path(user.directory) / "daemon.sock"
        user.environment |= {"SPILLWAY_DAEMON": str(socket_path)}
        daemon = begun("daemon", "--local", "16M")
        eventually(socket_path.exists, "the daemon")
    attached = begun("attach", target.pid, "--local", "16M")
    eventually(lambda: has_agent(target.pid), "its agent")
    (agent,) = (thread for thread, name in threads(target.pid) if name == "spillway-agent")

    delays = itertools.cycle(range(0, 50, 5))

    def is_stopped_in_an_order():
        """Lets pages come home and leave again, and stops it meanwhile. Agents that have no order read."""
        assert user.cli("resize", target.pid, "64M").returncode == 0
        target.unharmed()
        assert user.cli("resize", target.pid, "4M").returncode == 0
        time.sleep(next(delays) / 1000)
        os.kill(target.pid, signal.SIGSTOP)
        eventually(lambda: state(agent) in "tT", "it to be stopped")
        with open(f"/proc/{target.pid}/task/{agent}/syscall") as call:
            if not call.read().startswith("0 "):
                return True
        os.kill(target.pid, signal.SIGCONT)
        return False

    eventually(is_stopped_in_an_order, "its agent to be stopped in the middle of something", timeout=60)
    detached = user.cli("detach", target.pid)
    assert detached.returncode == 0, detached.stderr
    assert not has_agent(target.pid)
    os.kill(target.pid, signal.SIGCONT)
    target.unharmed()
    done = attached.finish(timeout=30).must_succeed()
    assert ("by the daemon" in done.err) == (pager == "daemon"), done.err
    if pager == "daemon":
        os.kill(daemon.process.pid, signal.SIGTERM)
        daemon.finish(timeout=30)


def test_root_without_device(processes, spillway, build, tmp_path):
    """A container may lack the device: what root starts may trace, and so have a userfaultfd by the system call."""
    nodes = " && ".join(f"cp -a /dev/{name} {shlex.quote(str(tmp_path))}" for name in ("null", "zero", "urandom"))
    script = f"{nodes} && mount --bind {shlex.quote(str(tmp_path))} /dev"
    stats = tmp_path / "stats"
    words = [*in_namespace(script), spillway.path, "run", "--local", "8M", "--stats", stats, "--", build("fill"), 32]
    program = Program(processes, words).ready()
    program.unharmed()
    program.tell("exit 0")
    assert program.status() == 0
    assert json.loads(stats.read_text())["evicted_pages"] > 0


def test_where_nobody_may_trace(spillway, target, tmp_path):
    """Root neither, until the next boot: `run` began its program all the same, without a budget."""
    yama, trace = "/proc/sys/kernel/yama", tmp_path / "it ran"
    words = in_namespace(f"mount -t tmpfs none /proc/sys/kernel && mkdir {yama} && echo 3 >{yama}/ptrace_scope")

    def cli(*arguments):
        return subprocess.run([*words, spillway.path, *map(str, arguments)], timeout=60, capture_output=True, text=True)

    refused(cli("run", "--local", "8M", "--", "touch", trace), "reboot")
    refused(cli("attach", target.pid, "--local", "8M"), "reboot")
    refused(cli("daemon", "--local", "8M"), "reboot")
    assert not trace.exists()
    (check,) = (check for check in json.loads(cli("doctor", "--json").stdout) if check["name"] == "ptrace")
    assert not check["ok"] and "reboot" in check["remedy"], check
    target.unharmed()


@pytest.fixture(params=["an older kernel", "a kernel without MOVE"])
def lesser_kernel(request, need, build):
    """What comes before a command that is to see a lesser kernel."""
    if request.param == "an older kernel":
        return [*need("setarch"), "--uname-2.6"]
    return [build("lesser"), FEATURES_WITHOUT_MOVE]


def test_kernels_that_are_too_old(processes, spillway, target, tmp_path, lesser_kernel):
    def cli(*arguments):
        process = processes.start([*lesser_kernel, spillway.path, *arguments], **PIPES)
        out, err = process.communicate(timeout=30)
        return subprocess.CompletedProcess([], process.returncode, out, err)

    before, trace = traits(target.pid), tmp_path / "it ran"
    refused(cli("run", "--local", "8M", "--", "touch", trace), "UFFDIO_MOVE", "Linux 6.8 or newer")
    refused(cli("attach", target.pid, "--local", "8M"), "UFFDIO_MOVE", "Linux 6.8 or newer")
    assert not trace.exists()
    assert traits(target.pid) == before
    target.unharmed()
    doctor = cli("doctor")
    assert doctor.returncode == 1
    assert "remedy: boot" in doctor.stdout and "Linux 6.8 or newer" in doctor.stdout, doctor.stdout


# Tries what the files that the agent keeps can be opened for, and cut short.
PRY = """
import errno, glob, json, os, sys
held = bytearray(os.urandom(1 << 20)) * 16
print("READY", flush=True)
sys.stdin.readline()
found = {}
for path in glob.glob("/proc/self/task/*/fd/*"):
    if not (link := os.path.lexists(path) and os.readlink(path)) or "memfd:" not in link:
        continue
    name = os.path.basename(link.split(" ")[0])
    for what, attempt in {
        "read": lambda: os.open(path, os.O_RDONLY),
        "write": lambda: os.open(path, os.O_RDWR),
        "truncate": lambda: os.truncate(path, 0),
        "chmod": lambda: os.chmod(path, 0o777),
    }.items():
        try:
            attempt()
            found[f"{name} {what}"] = "done"
        except OSError as error:
            found[f"{name} {what}"] = errno.errorcode[error.errno]
print(json.dumps(found), flush=True)
sys.stdin.read()
"""


def test_a_program_reaches_nothing_of_its_pager(spillway, user):
    """A daemon's pool has the pages of all its programs: each could be read, and changed, by every other; and a file that was cut
    short ended the pager, and with it all of them."""
    program = user.processes.start(user.words("python3", "-c", PRY), cwd="/", text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert program.stdout.readline() == "READY\n"
    attached = spillway.attach(program.pid, "8M")
    spillway.settled(program.pid)
    program.stdin.write("\n")
    program.stdin.flush()
    found = json.loads(program.stdout.readline())
    vault = {what.split()[1]: answer for what, answer in found.items() if "vault" in what}
    assert vault == {"read": "EACCES", "write": "EACCES", "truncate": "EACCES", "chmod": "EPERM"}, found
    assert found["memfd:spillway-agent truncate"] == "EPERM", found
    spillway.detach(program.pid)
    assert attached.process.wait(10) == 0


def test_who_may_take_over(processes, spillway, user, setcap):
    """What root's pager has left is root's; what a user's has left is that user's, and root's."""
    user.give_capabilities(setcap)
    user.give_device()
    target = user.program()

    def attach(words):
        pager = processes.start([*words, "attach", target.pid, "--local", "8M"], stderr=subprocess.PIPE, text=True, cwd="/", env=user.environment)
        return pager, pager.stderr.readline()

    def kill(pager):
        spillway.settled(target.pid)
        pager.kill()
        pager.wait(10)

    root, theirs = [spillway.path], user.words(user.binary)
    pager, line = attach(root)
    assert "adopted process" in line
    refused(user.cli("attach", target.pid), "another user", "as that user")
    kill(pager)
    refused(user.cli("attach", target.pid), "another user", "as that user")
    pager, line = attach(root)
    assert "took process" in line
    target.unharmed()
    spillway.detach(target.pid)
    assert pager.wait(10) == 0
    pager, line = attach(theirs)
    assert "adopted process" in line
    kill(pager)
    pager, line = attach(root)
    assert "took process" in line
    target.unharmed()
    spillway.detach(target.pid)
    assert pager.wait(10) == 0
    target.unharmed()


# Listens where a pager of this user would, and answers every question with the same words again and again.
STRANGER = """
import os, socket, sys, time
os.makedirs(sys.argv[1], 0o700, exist_ok=True)
place = os.path.join(sys.argv[1], "1.sock")
listener = socket.socket(socket.AF_UNIX)
listener.bind(place)
listener.listen(64)
print("READY", flush=True)
while True:
    connection, _ = listener.accept()
    if os.fork() == 0:
        for _ in range(30):
            connection.sendall(sys.argv[2].encode() + b"\\n")
            time.sleep(1)
        os._exit(0)
"""


@pytest.fixture
def stranger(processes, need):
    """Starts what another user could put in the way of root's commands."""
    (setpriv,) = need("setpriv")
    place = pathlib.Path(f"/tmp/spillway-{NOBODY}")

    def start(answer):
        rights = [setpriv, f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
        command = [*rights, "python3", "-c", STRANGER, place, answer]
        process = processes.start(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout.readline() == "READY\n"

    shutil.rmtree(place, ignore_errors=True)
    yield start
    shutil.rmtree(place, ignore_errors=True)


@pytest.mark.alone
def test_another_user_does_not_keep_commands_waiting(spillway, stranger):
    """One that only ever said how far it was kept `ps` waiting for ever, and `attach` deaf to Ctrl-C."""
    stranger('{"progress":[0,1]}')
    began = time.monotonic()
    spillway.ps()
    assert time.monotonic() - began < 8


def test_another_user_is_not_believed_about_processes(processes, spillway, stranger, build):
    """One that claimed a process was asked in its pager's stead: it could not be adopted, or was let go only in words."""
    target = Program(processes, [build("fill"), 32]).ready()
    attached = spillway.attach(target.pid, "8M")
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as connection:
        connection.connect(f"/run/spillway/{attached.process.pid}.sock")
        connection.sendall(b'{"op":"stats"}\n')
        listing = json.loads(connection.makefile().readline())
    assert listing["ok"]["pid"] == target.pid
    spillway.detach(target.pid)
    attached.process.wait(10)
    stranger(json.dumps(listing))
    again = processes.start([spillway.path, "attach", target.pid, "--local", "8M"], stderr=subprocess.PIPE, text=True)
    assert "adopted process" in (line := again.stderr.readline()), line
    # Once it is there to be asked.
    eventually(lambda: os.path.exists(f"/run/spillway/{again.pid}.sock"), "its socket")
    spillway.detach(target.pid)
    assert again.wait(10) == 0 and traits(target.pid)["registered"] == 0
    target.unharmed()
