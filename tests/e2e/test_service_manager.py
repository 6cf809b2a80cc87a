"""What a service manager sees of `spillway daemon`: the words that it waits for, and the unit and the settings that are shipped.

No service manager runs here: a test has the socket that one would have, and does what the unit tells.
"""

import configparser
import pathlib
import re
import shlex
import shutil
import signal
import socket
import subprocess

import pytest
from harness import MIB, REPOSITORY, eventually
from mechanics import Program
from test_daemon import attach, daemon, fill, within  # noqa: F401

UNIT = REPOSITORY / "contrib/systemd/spillway.service"
SETTINGS = REPOSITORY / "contrib/systemd/daemon.toml"
# What the daemon asks for while pages come home, 30 s, has to be asked for again before that is over.
EXTEND, EXTEND_SECONDS = "EXTEND_TIMEOUT_USEC=30000000", 30


class Manager:
    """The socket of a service manager."""

    FILLER = b"FILLER"

    def __init__(self, name):
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.address = name.replace("@", "\0", 1)
        self.socket.bind(self.address)
        self.socket.settimeout(EXTEND_SECONDS / 2)
        self.senders = []

    def fill(self):
        """From now on whoever has a word for it waits until it listens."""
        while True:
            sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self.senders.append(sender)
            sender.connect(self.address)
            sender.setblocking(False)
            sent = 0
            try:
                while True:
                    sender.send(self.FILLER)
                    sent += 1
            except BlockingIOError:
                # Either it has sent what one sender may, or there is no room for anybody.
                if not sent:
                    return

    def hear(self):
        """The next word that is not its own."""
        while (word := self.socket.recv(4096)) == self.FILLER:
            pass
        return word.decode()

    def rest(self):
        """What it was told until now."""
        self.socket.setblocking(False)
        words = []
        while True:
            try:
                words.append(self.hear())
            except BlockingIOError:
                return words

    def close(self):
        for each in [self.socket, *self.senders]:
            each.close()


@pytest.fixture(params=["a file", "an abstract name"])
def manager(request, tmp_path, monkeypatch):
    name = str(tmp_path / "notify") if request.param == "a file" else f"@{tmp_path}/notify"
    one = Manager(name)
    monkeypatch.setenv("NOTIFY_SOCKET", name)
    yield one
    one.close()


def test_it_is_ready_when_it_answers_and_not_before(processes, spillway, daemon, manager):  # noqa: F811
    manager.fill()
    daemon.process = processes.start(daemon.command("--local", "32M"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    # It waits with its first word as long as nobody listens, so what answers now answers without that.
    eventually(lambda: spillway.find(daemon.pid), "the daemon to answer `spillway ps`")
    assert manager.hear() == "READY=1"
    daemon.process.send_signal(signal.SIGTERM)
    assert manager.hear() == "STOPPING=1", "one word is enough"
    assert daemon.process.wait(20) == 0
    assert set(manager.rest()) <= {EXTEND}


@pytest.mark.parametrize("asked", ["by a signal", "by detach"])
@pytest.mark.parametrize("manager", ["a file"], indirect=True)
def test_its_end_is_waited_for_while_pages_come_home(processes, spillway, daemon, fill, servers, manager, asked):  # noqa: F811
    server = servers.spillway()
    daemon.start("--local", "8M", "--pool", f"tcp://{server.address}?deadline=60s")
    assert manager.hear() == "READY=1"
    target = Program(processes, [fill, 48]).ready()
    attach(spillway, target.pid)
    within(spillway, target.pid, 8 * MIB)
    # While its server says nothing no page comes home, however fast this machine is.
    server.send(signal.SIGSTOP)
    if asked == "by detach":
        processes.start([spillway.path, "detach", daemon.pid], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    else:
        daemon.process.send_signal(signal.SIGTERM)
        assert manager.hear() == "STOPPING=1"
    # Each time within half of the time that it was given.
    assert [manager.hear() for _ in range(5)] == [EXTEND] * 5
    assert daemon.process.poll() is None
    server.send(signal.SIGCONT)
    assert daemon.process.wait(30) == 0
    said = manager.rest()
    if asked == "by detach":
        # An end that may still fail is none yet: the service manager would kill a daemon that serves on.
        assert said.pop() == "STOPPING=1", said
    assert set(said) <= {EXTEND}
    target.unharmed()


def unit():
    """The sections of the unit that is shipped."""
    parser = configparser.ConfigParser(interpolation=None, comment_prefixes=("#", ";"))
    parser.optionxform = str
    parser.read_string(UNIT.read_text())
    return parser


def as_installed_here(words, spillway, settings):
    """A command of the unit, as words, with the places where things are installed replaced by those of this test."""
    places = {"/usr/local/bin/spillway": str(spillway.path), "/etc/spillway/daemon.toml": str(settings)}
    strange = [word for word in shlex.split(words) if word.startswith("/") and word not in places]
    assert not strange, f"places that this test does not know: {strange}"
    return [places.get(word, word) for word in shlex.split(words)]


@pytest.mark.parametrize("manager", ["a file"], indirect=True)
def test_the_units_commands_start_it_and_have_the_next_one_take_over(
    processes, spillway, daemon, fill, tmp_path, monkeypatch, manager  # noqa: F811
):
    service = unit()["Service"]
    # Nobody else starts the next one, for which targets wait.
    assert service["Restart"] == "always" and unit()["Unit"]["StartLimitIntervalSec"] == "0"
    settings = shutil.copy(SETTINGS, tmp_path / "daemon.toml")
    monkeypatch.setattr(daemon, "command", lambda: as_installed_here(service["ExecStart"], spillway, settings))
    daemon.start()
    assert service["Type"] == "notify" and manager.hear() == "READY=1"
    entry = spillway.find(daemon.pid)
    total = int(re.search(r"MemTotal: +(\d+) kB", pathlib.Path("/proc/meminfo").read_text())[1]) * 1024
    assert entry["daemon"] and total // 2 - MIB < entry["budget_bytes"] <= total // 2, entry
    assert daemon.done(op="stats")["pool"] == "local:"
    target = Program(processes, [fill, 8]).ready()
    attach(spillway, target.pid, "--local", "4M")
    within(spillway, target.pid, 4 * MIB)
    reload = shlex.split(service["ExecReload"].replace("$MAINPID", str(daemon.pid)))
    subprocess.run(reload, check=True, timeout=10)
    assert daemon.process.wait(10) == 0
    assert "took 1 processes over" in daemon.start()
    assert manager.hear() == "READY=1"
    target.unharmed()


def test_every_setting_that_is_shipped_is_understood(spillway, daemon, tmp_path):  # noqa: F811
    settings = tmp_path / "daemon.toml"
    # With those in force that are there to be chosen from.
    settings.write_text(re.sub(r"^# (?=\w+ = )", "", SETTINGS.read_text(), flags=re.MULTILINE))
    said = dict(re.findall(r'^(\w+) = "(.*)"$', settings.read_text(), re.MULTILINE))
    assert set(said) == {"local", "pool", "policy", "evict", "scope", "block"}
    daemon.start("--config", settings)
    entry = spillway.find(daemon.pid)
    for key in ("policy", "evict", "scope", "block"):
        assert entry[key] == said[key], key


def test_systemd_understands_the_unit(spillway, tmp_path):
    if not shutil.which("systemd-analyze"):
        pytest.skip("no systemd-analyze")
    # It looks whether the program is there.
    here = UNIT.read_text().replace("/usr/local/bin/spillway", str(spillway.path))
    copy = tmp_path / UNIT.name
    copy.write_text(here)
    done = subprocess.run(["systemd-analyze", "verify", copy], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30)
    # What is not known there is said, and is no failure. Other units of this machine are not ours to mend.
    assert done.returncode == 0 and UNIT.name not in done.stdout + done.stderr, done.stdout + done.stderr
