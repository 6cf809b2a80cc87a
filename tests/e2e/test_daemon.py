"""One pager for all targets of a host: `spillway daemon`, what is asked of it, and what becomes of its targets when it dies."""

import contextlib
import json
import os
import pathlib
import random
import re
import signal
import subprocess
import time

import harness
import pytest
from daemons import Daemon, resources
from harness import MIB, eventually
from mechanics import Program, Silence, outlasts_a_debugger, refused, running, traits, verdict
from test_takeover import url_of

# How long processes are adopted, resized and let go in a row.
CHURN_SECONDS = float(os.environ.get("SPILLWAY_DAEMON_SECONDS", "6"))
STALL_SECONDS = 2.0


@pytest.fixture
def fill(build):
    return build("fill")


@pytest.fixture
def daemon(processes, spillway, tmp_path, monkeypatch):
    directory = tmp_path / "daemon"
    directory.mkdir(mode=0o700)
    one = Daemon(processes, spillway, directory)
    # Commands find it by this, those that the tests start as well.
    monkeypatch.setenv("SPILLWAY_DAEMON", str(one.socket))
    return one


def attach(spillway, pid, *arguments):
    done = spillway.cli("attach", pid, *arguments)
    assert done.returncode == 0 and "by the daemon" in done.stderr, done.stderr


def within(spillway, pid, limit):
    """Waits until so little of a target is local, as the pager and the kernel count it."""

    def is_within():
        entry = spillway.find(pid)
        return entry if entry and entry["local_bytes"] <= limit and harness.anonymous_bytes(pid) <= limit + 2 * MIB else None

    return eventually(is_within, f"process {pid} within {limit} bytes", 30, every=0.1)


def test_two_targets_share_one_budget_and_one_is_let_go(processes, spillway, daemon, fill):
    daemon.start("--local", "32M")
    before, targets = [], []
    for _ in range(2):
        target = Program(processes, [fill, 48]).ready()
        before.append(traits(target.pid))
        attach(spillway, target.pid)
        targets.append(target)
    one, other = targets

    def settled():
        rows = {row["pid"]: row for row in spillway.ps()}
        return rows if sum(rows[target.pid]["local_bytes"] for target in targets) <= 32 * MIB else None

    rows = eventually(settled, "both to be within the budget", 30)
    whole, rows = rows[daemon.pid], [rows[target.pid] for target in targets]
    assert whole["daemon"] and whole["budget_bytes"] == 32 * MIB
    for row in rows:
        assert row["touched_bytes"] >= 40 * MIB and row["stored_bytes"] > 0 and row["daemon_pid"] == daemon.pid, row
    for target in targets:
        target.ask("verify")
    # The whole budget, then the maximum of one of them.
    spillway.resize(daemon.pid, "64M")
    eventually(lambda: spillway.find(daemon.pid)["budget_bytes"] == 64 * MIB, "the larger budget")
    spillway.resize(one.pid, "8M")
    assert within(spillway, one.pid, 8 * MIB)["max_bytes"] == 8 * MIB
    one.ask("verify")
    assert spillway.find(one.pid)["local_bytes"] <= 8 * MIB
    other.ask("verify")
    # One goes, with all of its pages and nothing of ours, and the other pages on.
    spillway.detach(one.pid)
    assert spillway.find(one.pid) is None
    assert traits(one.pid) == before[0]
    one.unharmed()
    spillway.resize(daemon.pid, "16M")
    within(spillway, other.pid, 16 * MIB)
    other.ask("verify")
    # It may come back, and all go when the daemon is told to end.
    attach(spillway, one.pid, "--local", "8M")
    within(spillway, one.pid, 8 * MIB)
    spillway.detach(daemon.pid)
    assert daemon.process.wait(20) == 0
    for target, was in zip(targets, before):
        assert traits(target.pid) == was
        target.unharmed()
    assert not daemon.socket.exists()


@pytest.mark.alone
def test_a_busy_target_goes_on_while_another_is_let_go(processes, spillway, daemon, fill):
    daemon.start("--local", "48M")
    busy, leaving = (Program(processes, [fill, mib]).ready() for mib in (64, 96))
    for target in (busy, leaving):
        attach(spillway, target.pid)
    eventually(lambda: spillway.find(daemon.pid)["local_bytes"] <= 48 * MIB, "both to be within the budget", 30)
    busy.tell("churn 4000")
    faults = spillway.find(busy.pid)["faults"]
    answers = daemon.ask(op="release", pid=leaving.pid)
    assert answers[-1] == {"ok": {}} and any("progress" in answer for answer in answers), answers
    now = spillway.find(busy.pid)
    assert now["faults"] > faults and now["local_bytes"] <= 48 * MIB, "it pages on, within the budget"
    leaving.unharmed()
    assert busy.line(30) == "OK"
    busy.unharmed()


@pytest.mark.alone
def test_ps_tells_how_often_programs_fault(processes, spillway, daemon, fill):
    daemon.start("--local", "16M")
    served = Program(processes, [fill, 32]).ready()
    attach(spillway, served.pid)
    alone = Program(processes, [fill, 32], spillway, "8M", ["--no-daemon"]).ready()
    spillway.settled(alone.pid)
    pids = [served.pid, alone.pid]
    for target in (served, alone):
        target.tell("churn 4000")

    def seen():
        return [spillway.find(pid) for pid in pids], time.monotonic()

    time.sleep(0.6)
    (before, since) = seen()
    time.sleep(1)
    (now, until) = seen()
    for first, then in zip(before, now, strict=True):
        per_s = (then["faults"] - first["faults"]) / (until - since)
        assert per_s / 2 < then["faults_per_s"] < per_s * 2 and per_s > 10, (first, then)
    head, *lines = (re.split(r"\s{2,}", line.strip()) for line in spillway.cli("ps").stdout.splitlines())
    assert head == ["PID", "PROCS", "TOUCHED", "LOCAL", "BUDGET", "STORED", "FAULTS/S", "P50 US", "P99 US", "COMMAND"]
    rows = {row["PID"]: row for row in (dict(zip(head, line, strict=True)) for line in lines)}
    for pid in pids:
        assert int(rows[str(pid)]["FAULTS/S"]) > 10, rows
    for target in (served, alone):
        target.answer("churn")


def test_threads_that_follow_each_other_become_a_target(processes, spillway, daemon, build):
    """Each that was looked at ended just then: the program was refused, or forgotten, and had no budget."""
    daemon.start("--local", "8M")
    command = [spillway.path, "run", "-q", "--", build("torch"), "24", "2", "late"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    program = processes.start(command, **pipes)
    assert program.stdout.readline() == "READY\n"
    (target,) = eventually(lambda: daemon.done(op="stats")["targets"], "it to be a target")
    within(spillway, target["pid"], 8 * MIB)
    assert program.communicate(timeout=30)[0] == "OK\n" and program.returncode == 0


@pytest.mark.alone
def test_threads_that_follow_each_other_are_adopted_as_they_do(processes, spillway, daemon, build):
    """The memory of one that is ending is gone before it is: that was taken for a refusal that lasts."""
    daemon.start("--local", "8M")
    program = processes.start([spillway.path, "run", "-q", "--", build("torch"), "24", "4"], stdout=subprocess.PIPE, text=True)
    eventually(lambda: daemon.done(op="stats")["targets"], "it to be a target", 3)
    assert program.communicate(timeout=30)[0] == "OK\n" and program.returncode == 0


@pytest.mark.alone
def test_a_stopped_program_keeps_nobody_waiting(processes, spillway, daemon, fill):
    """Its agent does nothing until it goes on: neither make room for others, nor what is waited for at the end of a pager."""
    daemon.start("--local", "24M")
    stopped, other = (Program(processes, [fill, mib]).ready() for mib in (64, 32))
    attach(spillway, stopped.pid)
    within(spillway, stopped.pid, 24 * MIB)
    os.kill(stopped.pid, signal.SIGSTOP)
    attach(spillway, other.pid)
    for _ in range(3):
        other.ask("verify")
    spillway.resize(daemon.pid, "12M")
    other.ask("verify")
    spillway.detach(other.pid)
    other.unharmed()
    os.kill(stopped.pid, signal.SIGCONT)
    within(spillway, stopped.pid, 12 * MIB)
    stopped.ask("verify")
    # Told to, and stopped before it can: the daemon ends all the same.
    os.kill(stopped.pid, signal.SIGSTOP)
    spillway.resize(daemon.pid, "8M")
    time.sleep(0.05)
    daemon.process.send_signal(signal.SIGTERM)
    assert daemon.process.wait(20) == 0
    os.kill(stopped.pid, signal.SIGCONT)
    stopped.unharmed()


@contextlib.contextmanager
def freezer(pid):
    """What freezes a process, or lets it go on, as the pausing of its container does."""
    root = next((root for root in map(pathlib.Path, ("/sys/fs/cgroup/freezer", "/sys/fs/cgroup")) if (root / "cgroup.procs").exists()), None)
    if root is None or os.geteuid() != 0:
        pytest.skip("no freezer")
    group = root / f"spillway-test-{pid}"
    group.mkdir()
    new = (group / "cgroup.freeze").exists()

    def freeze(frozen):
        (group / ("cgroup.freeze" if new else "freezer.state")).write_text(str(int(frozen)) if new else ["THAWED", "FROZEN"][frozen])

    try:
        (group / "cgroup.procs").write_text(str(pid))
        yield freeze
    finally:
        freeze(False)
        with contextlib.suppress(ProcessLookupError):
            (root / "cgroup.procs").write_text(str(pid))
        eventually(lambda: not (group / "cgroup.procs").read_text(), "the group to be empty")
        group.rmdir()


@pytest.mark.alone
def test_a_program_frozen_while_its_pages_leave_keeps_nobody_waiting(processes, spillway, daemon, fill):
    """Its agent had begun, and could not be told not to: until it went on, others' faults waited for the room that it would make."""
    daemon.start("--local", "32M")
    frozen, other = (Program(processes, [fill, mib]).ready() for mib in (64, 16))
    with freezer(frozen.pid) as freeze:
        for target in (frozen, other):
            attach(spillway, target.pid)
        for tried in range(16):
            frozen.tell("churn 300")
            time.sleep(0.1 + 0.007 * tried)
            freeze(True)
            spillway.resize(daemon.pid, "8M")
            other.ask("verify", 10)
            freeze(False)
            spillway.resize(daemon.pid, "32M")
            frozen.answer("churn")
    for target in (frozen, other):
        target.unharmed()


def test_a_run_goes_to_the_daemon(processes, spillway, daemon, fill):
    daemon.start("--local", "24M")
    program = Program(processes, [fill, 64], spillway=spillway, local="16M").ready()
    entry = eventually(lambda: spillway.find(program.pid), "the program to be listed")
    assert entry["daemon_pid"] == daemon.pid and entry["max_bytes"] == 16 * MIB and entry["front_pid"] == program.process.pid
    within(spillway, program.pid, 16 * MIB)
    program.ask("verify")
    # Named by the `spillway run` before it, as ever.
    done = spillway.cli("set", program.process.pid, "min=8M", "weight=300")
    assert done.returncode == 0, done.stderr
    entry = spillway.find(program.pid)
    assert (entry["min_bytes"], entry["weight"], entry["max_bytes"]) == (8 * MIB, 300, 16 * MIB)
    # The next daemon hears of it again, and of the one before it that stops and goes on with it.
    small = Program(processes, [fill, 1], spillway=spillway, local="16M").ready()
    eventually(lambda: small.pid in [target["pid"] for target in daemon.done(op="stats")["targets"]], "the small one to be watched")
    daemon.kill()
    daemon.start()
    for each in (program, small):

        def is_told_of():
            return daemon.ask(op="show", pid=each.pid)[-1].get("ok", {}).get("front_pid") == each.process.pid

        eventually(is_told_of, "it to be told of", 10)
        each.ask("verify")
    pid = program.pid
    program.process.stdin.close()
    assert program.status() == 0
    assert "served by the daemon" in program.err.decode()
    eventually(lambda: spillway.find(pid) is None, "the program to be forgotten")
    # One that stays small is never touched, and its status is its own.
    done = spillway.cli("run", "--", "sh", "-c", "exit 7")
    assert done.returncode == 7, done.stderr
    # A pager of its own where that is wanted.
    own = spillway.cli("run", "--no-daemon", "--local", "8M", "--", fill, "16", "--once", timeout=60)
    assert own.returncode == 0 and "peak" in own.stderr, own.stderr


@pytest.mark.alone
def test_a_minimum_is_kept(processes, spillway, daemon, fill):
    daemon.start("--local", "48M")
    quiet, wild = (Program(processes, [fill, mib]).ready() for mib in (16, 96))
    attach(spillway, quiet.pid, "--min", "20M")
    attach(spillway, wild.pid)
    eventually(lambda: spillway.find(daemon.pid)["local_bytes"] <= 48 * MIB, "both to be within the budget", 30)
    quiet.ask("verify")
    evicted = spillway.find(quiet.pid)["evicted_pages"]
    wild.ask("churn 2000")
    wild.ask("verify")
    entry = spillway.find(quiet.pid)
    assert entry["evicted_pages"] == evicted and entry["local_bytes"] >= 13 * MIB, entry
    # The kernel says so, too.
    assert harness.anonymous_bytes(quiet.pid) >= 13 * MIB
    # Without it, the other's pages are worth as much as its own.
    assert spillway.cli("set", quiet.pid, "min=0").returncode == 0
    wild.ask("churn 2000")
    assert spillway.find(quiet.pid)["evicted_pages"] > evicted
    quiet.unharmed()
    wild.unharmed()


def test_what_makes_no_sense_is_refused(processes, spillway, daemon, fill, tmp_path):
    config = tmp_path / "daemon.toml"
    config.write_text('local = "32M"\n\nlocla = "8G"\n')
    refused(spillway.cli("daemon", "--config", config), "line 3", "locla")
    config.write_text('policy = "fast"\n')
    refused(spillway.cli("daemon", "--config", config), "one of rr, clock")
    refused(spillway.cli("daemon", "--config", tmp_path / "none.toml"), "no such file")
    refused(spillway.cli("daemon", "--pool", "nosuch://x"), "nosuch")
    refused(spillway.cli("daemon", "--local", "1M"), "at least")
    config.write_text('local = "32M"\npolicy = "lru3"\n')
    daemon.start("--config", config)
    refused(spillway.cli("daemon"), "already", str(daemon.pid))
    assert spillway.find(daemon.pid)["policy"] == "lru3"
    for arguments, words in [
        (["attach", 4194305], ["no process 4194305"]),
        (["attach", os.getpid(), "--pool", "file:///nowhere?size=64M"], ["the daemon keeps pages in `local:`", "--no-daemon"]),
        (["run", "--policy", "clock", "--", "true"], ["--policy is `lru3`", "--no-daemon"]),
        (["attach", os.getpid(), "--min", "64M"], ["minima"]),
        (["set", daemon.pid, "min=8M"], ["for one target"]),
        (["set", 4194305, "weight=0"], ["no weight"]),
        (["resize", daemon.pid, "1M"], ["at least"]),
        (["upgrade", daemon.pid], ["kill -HUP"]),
    ]:
        refused(spillway.cli(*arguments), *words)
    target = Program(processes, [fill, 32]).ready()
    attach(spillway, target.pid, "--min", "8M")
    refused(spillway.cli("attach", target.pid), "managed already")
    refused(spillway.cli("set", target.pid, "policy=lru"), "for all targets", f"spillway set {daemon.pid}")
    refused(spillway.cli("set", target.pid, "max=4M"), "above the maximum")
    refused(spillway.cli("resize", daemon.pid, "4M"), "minima")
    refused(spillway.cli("attach", target.pid, "--stats", tmp_path / "s.json"), "--no-daemon")
    # Strangers' bytes cost an error line.
    for request in [{"op": "adopt"}, {"op": "adopt", "pid": 1, "more": 2}, {"op": "release", "pid": 4194305}, {"op": "detach"}]:
        assert "error" in daemon.ask(**request)[-1], request
    target.unharmed()


@pytest.mark.alone
def test_each_is_told_of_its_own_pause(processes, daemon, fill):
    daemon.start("--local", "48M")
    target = Program(processes, [fill, 8]).ready()
    pauses = []
    for _ in range(10):
        pauses.append(daemon.done(op="adopt", pid=target.pid)["adopt_pause_us"])
        daemon.done(op="release", pid=target.pid)
    # Ten that happen to be in order would be one in three million.
    assert all(pauses) and pauses != sorted(pauses), pauses


@pytest.mark.alone
@pytest.mark.parametrize(("pool", "rounds"), [("local", 3), ("tcp", 1), ("parity", 1)])
def test_a_daemon_that_is_killed_is_taken_over_by_the_next(processes, spillway, servers, daemon, fill, pool, rounds):
    daemon.start("--local", "48M", "--pool", url_of(servers, pool))
    targets = [Program(processes, [fill, 48]).ready() for _ in range(2)]
    attach(spillway, targets[0].pid, "--local", "16M", "--min", "4M")
    attach(spillway, targets[1].pid)
    within(spillway, targets[0].pid, 16 * MIB)
    for _ in range(rounds):
        for target in targets:
            target.tell("churn 1500")
        time.sleep(0.3)
        daemon.kill()
        refused(spillway.cli("attach", targets[0].pid), "spillway daemon")
        refused(spillway.cli("detach", targets[1].pid), "spillway daemon")
        since = time.monotonic()
        said = daemon.start()
        stalled = time.monotonic() - since
        assert "took 2 processes over" in said and stalled < STALL_SECONDS, (said, stalled)
        for target in targets:
            assert target.line(30) == "OK"
            target.ask("verify")
    # The terms are what they were.
    entry = spillway.find(targets[0].pid)
    assert (entry["max_bytes"], entry["min_bytes"]) == (16 * MIB, 4 * MIB), entry
    assert spillway.find(daemon.pid)["budget_bytes"] == 48 * MIB
    # A new binary takes over the same way.
    daemon.process.send_signal(signal.SIGHUP)
    assert daemon.process.wait(10) == 0
    assert "took 2 processes over" in daemon.start("--local", "40M")
    assert spillway.find(daemon.pid)["budget_bytes"] == 40 * MIB
    # And lets them go one by one, the last with itself.
    before = traits(targets[0].pid)["mappings"]
    spillway.detach(targets[0].pid)
    assert len(traits(targets[0].pid)["mappings"]) < len(before)
    targets[0].unharmed()
    targets[1].ask("verify")
    daemon.process.send_signal(signal.SIGTERM)
    assert daemon.process.wait(20) == 0
    targets[1].unharmed()
    for target in targets:
        assert traits(target.pid)["registered"] == 0 and traits(target.pid)["TracerPid"] == "0"


@pytest.mark.alone
def test_a_debugger_of_one_that_is_let_go_keeps_nobody_else_waiting(processes, spillway, daemon, fill):
    daemon.start("--local", "16M", "--pool", "emulated:?delay=400us&serialize=1")
    one, other = [Program(processes, [fill, 24]).ready() for _ in range(2)]
    for target in [one, other]:
        attach(spillway, target.pid, "--local", "8M")
    within(spillway, one.pid, 8 * MIB)
    outlasts_a_debugger(processes, spillway, one)
    other.unharmed()


def test_a_daemon_whose_pool_ends_with_it_says_so_and_stays(processes, spillway, daemon, fill, tmp_path):
    daemon.start("--local", "8M", "--pool", f"file://{tmp_path}/pages?size=256M")
    assert "cannot be taken over" in daemon.process.stderr.readline()
    target = Program(processes, [fill, 32]).ready()
    attach(spillway, target.pid)
    within(spillway, target.pid, 8 * MIB)
    # A new version cannot take over either: nothing happens.
    daemon.process.send_signal(signal.SIGHUP)
    assert "no other pager can take over" in daemon.process.stderr.readline()
    target.unharmed()
    daemon.kill()
    # Its pages are no zeros for whoever comes next: it waits, and is as good as gone.
    assert "serving" in daemon.start("--local", "8M")
    refused(spillway.cli("attach", target.pid))
    target.tell("verify")
    with pytest.raises(Silence):
        target.line(1)
    assert running(target.pid)
    target.process.kill()
    assert target.status(5) == -signal.SIGKILL


def test_a_daemon_stays_where_the_next_one_would_be_refused(processes, spillway, daemon, fill, tmp_path):
    """It left on SIGHUP without a look at its settings: with a mistake in them nobody took over, and all targets waited."""
    settings = tmp_path / "daemon.toml"
    settings.write_text('local = "8M"\n')
    daemon.start("--config", settings)
    target = Program(processes, [fill, 32]).ready()
    attach(spillway, target.pid)
    within(spillway, target.pid, 8 * MIB)
    for wrong, why in [('locl = "8M"\n', "locl"), ('pool = "tcp://127.0.0.1:1"\n', "name the pool `tcp://127.0.0.1:1` now"), (None, "cannot read")]:
        settings.unlink()
        if wrong:
            settings.write_text(wrong)
        daemon.process.send_signal(signal.SIGHUP)
        said = daemon.process.stderr.readline()
        assert "stays: " in said and why in said, said
        target.unharmed()
    settings.write_text('local = "12M"\n')
    daemon.process.send_signal(signal.SIGHUP)
    assert daemon.process.wait(10) == 0
    assert "took 1 processes over" in daemon.start("--config", settings)
    assert spillway.find(daemon.pid)["budget_bytes"] == 12 * MIB
    target.unharmed()


# Who asks so late that there is no daemon any more serves its target itself, and does not end.
@pytest.mark.alone
@pytest.mark.parametrize("how", [signal.SIGHUP, signal.SIGTERM])
def test_a_daemon_that_ends_during_an_adoption_harms_nobody(processes, spillway, daemon, fill, how):
    """A program that was just being adopted went on in the middle of a system call of ours: it crashed. And one that came as all others
    had been let go was adopted, and left without a pager."""
    seed = int(os.environ.get("SPILLWAY_TORTURE_SEED", "0")) or int(time.time())
    chance = random.Random(seed)
    print(f"seed {seed}")
    for _ in range(8):
        daemon.start("--local", "64M")
        targets = [Program(processes, [fill, 8]).ready() for _ in range(6)]
        pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        callers = [processes.start([spillway.path, "attach", str(target.pid)], **pipes) for target in targets]
        time.sleep(chance.uniform(0.004, 0.05))
        daemon.process.send_signal(how)
        assert daemon.process.wait(20) == 0
        for caller in callers:
            caller.wait(10)
        if how == signal.SIGHUP:
            daemon.start("--local", "64M")
        for target in targets:
            target.unharmed()
            target.process.kill()
        if how == signal.SIGHUP:
            daemon.process.send_signal(signal.SIGTERM)
            assert daemon.process.wait(20) == 0


def test_who_asks_about_many_targets_costs_the_daemon_little_memory(processes, daemon, fill):
    """Each that is answered at the same time has an arena of the allocator's, which keeps what an answer once took."""
    daemon.start("--local", "64M")
    for _ in range(48):
        daemon.done(op="adopt", pid=Program(processes, [fill, 1]).ready().pid)

    def private_kib():
        return int(harness.status_field(daemon.pid, "RssAnon").split()[0])

    with contextlib.ExitStack() as asking:

        def asked():
            connection = asking.enter_context(daemon.asked(op="stats"))
            return len(json.loads(asking.enter_context(connection.makefile()).readline())["ok"]["targets"])

        assert asked() == 48
        before = private_kib()
        assert [asked() for _ in range(7)] == [48] * 7
        after = private_kib()
    assert after - before < 7 * 128, f"{before} KiB became {after}"


@pytest.mark.alone
def test_a_target_lives_on_in_a_child_that_nobody_has_told_of(processes, spillway, servers, daemon, daemonise, tmp_path):
    """Its first process ends as soon as it has forked, while a slow pool is waited for before the fork is told of: its child can be let go."""
    said = tmp_path / "said"
    daemon.start("--local", "12M", "--pool", f"tcp://{servers.spillway().address}?delay=60ms")
    let_go = 0
    for _ in range(4):
        program = processes.start([spillway.path, "run", "-q", "--", daemonise, 14, said, 128])
        assert program.wait(30) == 0
        # None where it had forked before it was adopted.
        for target in daemon.done(op="stats")["targets"]:
            daemon.done(op="release", pid=target["pid"])
            let_go += 1
        assert verdict(said) == "OK\n"
    assert let_go > 0


@pytest.mark.limit(int(CHURN_SECONDS + 80))
def test_many_come_and_go_and_nothing_is_left(processes, spillway, daemon, fill):
    seed = int(os.environ.get("SPILLWAY_TORTURE_SEED", "0")) or int(time.time())
    chance = random.Random(seed)
    print(f"seed {seed}")
    daemon.start("--local", "24M")
    lasting = Program(processes, [fill, 24]).ready()
    daemon.done(op="adopt", pid=lasting.pid)

    def adopt_some(count):
        for _ in range(count):
            target = Program(processes, [fill, chance.choice([1, 4, 12])]).ready()
            before = traits(target.pid)
            daemon.done(op="adopt", pid=target.pid, share={"max": chance.choice(["4M", "8M", "all"])})
            daemon.done(op="share", pid=target.pid, share={"weight": chance.choice([50, 100, 300])})
            daemon.done(op="resize", local=chance.choice(["16M", "24M", "32M"]))
            if chance.random() < 0.5:
                target.ask("verify")
            if chance.random() < 0.3:
                target.ask("fork")
            if chance.random() < 0.7:
                daemon.done(op="release", pid=target.pid)
                assert traits(target.pid) == before
                target.ask("verify")
            target.process.stdin.close()
            assert target.status() == 0
            processes.started.remove(target.process)
            for pipe in (target.process.stdout, target.process.stderr):
                pipe.close()

    def at_rest():
        now = daemon.done(op="stats")
        return [target["pid"] for target in now["targets"]] == [lasting.pid] and now["processes"] == 1

    # So many that the pool has been at its largest.
    adopt_some(40)
    eventually(at_rest, "the others to be forgotten")
    was, rounds = resources(daemon.pid), 0
    deadline = time.monotonic() + CHURN_SECONDS
    while time.monotonic() < deadline:
        adopt_some(5)
        rounds += 5
    eventually(at_rest, "the others to be forgotten")

    def no_more():
        now = resources(daemon.pid)
        return now if now[0] <= was[0] and now[1] <= was[1] else None

    # Threads that answer us end a moment after their answer.
    now = eventually(no_more, f"no more descriptors and threads than {was}", 10)
    print(f"{rounds} rounds: {was} descriptors, threads and KiB became {now}")
    assert rounds >= 5
    # The pool keeps what it had at its largest; beyond that, nothing may grow with the number of rounds.
    assert now[2] <= was[2] + 12 * 1024, f"{was[2]} KiB became {now[2]} in {rounds} rounds"
    assert running(lasting.pid)
    lasting.unharmed()
