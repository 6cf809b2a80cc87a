"""Five servers in network namespaces of their own are killed, cut off, stopped and filled at random, one at a time, while programs
with half of their memory local go on: no byte may be wrong, no page lost, no access may take longer than a second (and what the host
took of the CPUs meanwhile).

SPILLWAY_CHAOS_SECONDS is how long, a minute unless it says otherwise; SPILLWAY_CHAOS_SEED repeats the order of what is done.
"""

import contextlib
import json
import os
import random
import signal
import subprocess
import threading
import time

import clients
import pytest
from harness import MIB, eventually, session_members, tree
from lateness import Lateness
from mechanics import Program
from servers import Star
from test_pools import token
from test_programs import redis_command, value

SECONDS = float(os.environ.get("SPILLWAY_CHAOS_SECONDS", "60"))
SERVERS = 5
LEASE = 3
# Two CPUs run all of this; what is slow to start or to end is not what is tested.
SLACK_SECONDS = 120
STALL_US_MAX = 1_000_000


class Workload(threading.Thread):
    """Does one thing again and again until it is told to end; keeps what went wrong."""

    def __init__(self, name, once, over):
        super().__init__(name=name, daemon=True)
        self.once, self.over, self.rounds, self.failure = once, over, 0, None

    def run(self):
        try:
            while not self.over.is_set():
                self.once()
                self.rounds += 1
        except BaseException as failure:  # noqa: BLE001: it is raised again by whoever joins
            self.failure = failure

    def check(self):
        """Raises what went wrong."""
        if self.failure:
            raise AssertionError(f"{self.name}, after {self.rounds} rounds: {self.failure}") from self.failure


class Victims:
    """Servers in a star of namespaces, and what can happen to them."""

    def __init__(self, star, servers, spillway, secret, fill):
        self.star, self.servers, self.spillway, self.secret, self.fill = star, servers, spillway, secret, fill
        self.members = [self.started(at) for at in range(SERVERS)]
        self.log = []
        # Held while something is wrong: pools are opened where all servers are there.
        self.harm = threading.Lock()

    def started(self, at):
        options = ["--lease", str(LEASE)]
        within = self.star.within(at + 1)
        return self.servers.spillway("96M", 7070, self.secret, self.star.address(at + 1), within, options)

    def url(self, members=None, parameters="data=4&parity=1&deadline=3s&"):
        hosts = ",".join(member.address for member in members or self.members)
        return f"tcp://{hosts}?{parameters}token-file={self.secret}"

    def note(self, what, at):
        self.log.append(f"{time.monotonic():.2f} {what} {at}")
        print(self.log[-1], flush=True)

    def status(self):
        """What each server says of itself."""
        command = [*self.star.within(0), self.spillway.path, "pool", "status", self.url(), "--json"]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False)
        return json.loads(done.stdout)

    def protections(self):
        """How the pool of each pager is."""
        return [pager["protection"] for pager in self.spillway.ps() if pager.get("protection")]

    def has_pager(self, front):
        """Whether the pager of a `spillway run` is listed and has its pool, or that has ended."""
        ours = (pager for pager in self.spillway.ps() if pager["front_pid"] == front.pid)
        return front.poll() is not None or any(pager["evicted_pages"] for pager in ours)

    def healthy(self):
        return all(not now["degraded"] and not now["rebuilding"] for now in self.protections())

    def drained(self, at, dice):
        """It leaves, as far as it gets in the time, and stays after all."""
        for more in [[], ["--cancel"]]:
            command = [*self.star.within(0), self.spillway.path, "pool", "drain", self.members[at].address, self.url(), *more]
            draining = self.servers.processes.start(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                draining.wait(dice.uniform(1, 6))
            draining.kill()
            draining.wait(5)

    def killed(self, at, dice):
        self.members[at].kill()
        time.sleep(dice.uniform(0.1, 5))
        self.members[at] = self.started(at)

    def cut(self, at, dice):
        self.star.cut(at + 1)
        time.sleep(dice.uniform(0.05, 6))
        self.star.mend(at + 1)

    def stopped(self, at, dice):
        self.members[at].send(signal.SIGSTOP)
        time.sleep(dice.uniform(0.05, 3))
        self.members[at].send(signal.SIGCONT)

    def filled(self, at, _dice):
        """Someone else takes all there is, dies, and leaves its memory behind."""
        url = self.url([self.members[at]], "")
        command = [*self.star.within(0), self.spillway.path, "run", "-q", "--local", "8M", "--pool", url, "--", self.fill, 160]
        hog = Program(self.servers.processes, command)
        hog.ready()

        def full():
            free = self.status()[at]
            return free["error"] is None and free["capacity_bytes"] - free["used_bytes"] < 2 * MIB

        with contextlib.suppress(AssertionError):
            eventually(full, "the server to be full", 6)
        for pid in {*tree(hog.process.pid), *session_members(hog.process.pid)}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        hog.process.wait(5)

    def once(self, dice):
        """One thing that happens; and then it is waited until all groups are whole."""
        what = dice.choice(["killed", "killed", "cut", "stopped", "stopped", "filled", "drained"])
        at = dice.randrange(SERVERS)
        self.note(what, at)
        with self.harm:
            getattr(self, what)(at, dice)
            # Pagers connect again within a second, and have looked at all groups soon after.
            time.sleep(2)
        eventually(self.healthy, "all groups to be whole", 60, 0.2)
        self.note("whole after", at)


@pytest.fixture
def star(need):
    """Namespaces with a cable each to the first one; skipped where none may be made."""
    need("ip")
    made = Star(SERVERS + 1)
    try:
        made.make()
    except OSError as error:
        made.remove()
        pytest.skip(f"no network namespaces here: {error}")
    yield made
    made.remove()


@pytest.mark.limit(int(SECONDS + 2 * SLACK_SECONDS))
def test_programs_notice_nothing(star, processes, spillway, servers, build, need, tmp_path):
    stress, redis_server = need("stress-ng", "redis-server")
    seed = int(os.environ.get("SPILLWAY_CHAOS_SEED", "0")) or time.time_ns() // 1_000_000
    print(f"seed {seed}")
    dice = random.Random(seed)
    pool = Victims(star, servers, spillway, token(tmp_path / "token"), build("fill"))
    over = threading.Event()

    def under(local, *argv):
        return [*star.within(0), spillway.path, "run", "-q", "--local", local, "--pool", pool.url(), "--", *argv]

    filled = Program(processes, under("24M", build("fill"), 48)).ready()
    redis_process = processes.start(under("20M", redis_server, *redis_command(tmp_path, tmp_path / "dump.rdb")), stdout=subprocess.DEVNULL)
    redis = clients.Redis(tmp_path / "socket")
    keys = [b"key:%d" % i for i in range(30000)]
    version = dict.fromkeys(keys, 0)
    assert set(redis.pipeline(("SET", key, value(key, 0)) for key in keys)) == {b"OK"}
    lot = random.Random(seed + 1)

    def fill_once():
        command = lot.choice(["verify", "churn 1000", "churn 1000", "rewrite", "fork"])
        filled.ask(command, 60)

    def redis_once():
        some = lot.sample(keys, 200)
        for key in some:
            version[key] += 1
        assert set(redis.pipeline(("SET", key, value(key, version[key])) for key in some)) == {b"OK"}
        some = lot.sample(keys, 200)
        assert redis.call("MGET", *some) == [value(key, version[key]) for key in some], "wrong values"

    def ends_well(*argv):
        with pool.harm:
            done = processes.start(under("50%", *argv), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            eventually(lambda: pool.has_pager(done), "its pager to be there", 20)
        said, _ = done.communicate(timeout=90)
        # What went wrong comes first, a history of it last.
        assert done.returncode == 0, f"status {done.returncode}: {said[:3000]}\n[...]\n{said[-3000:]}"

    def stress_once():
        ends_well(stress, "--vm", 1, "--vm-bytes", "40M", "--vm-keep", "--verify", "--timeout", 8)

    def torture_once():
        ends_well(build("torture", "-Wshadow"), "--seed", lot.randrange(1, 1 << 40), "--seconds", 8, "--mib", 40, "--threads", 2)

    build("torture", "-Wshadow")
    each = {"fill": fill_once, "redis": redis_once, "stress-ng": stress_once, "torture": torture_once}
    workloads = [Workload(name, once, over) for name, once in each.items()]
    for workload in workloads:
        workload.start()
    # The longest stall of each pager, less what the host took in that time.
    seen, stalls, lately_us = {}, {}, [0, 0]

    def look(lateness):
        # Of the last two looks: a stall may end in another than what the host took.
        lately_us[:] = [lately_us[1], 1e6 * lateness.take()]
        late_us = max(lately_us)
        for workload in workloads:
            workload.check()
        for pager in spillway.ps():
            pid, most = pager["pager_pid"], pager["fault_us"]["max"]
            if most > seen.get(pid, 0):
                seen[pid], stalls[pid] = most, max(stalls.get(pid, 0), most - late_us)
                if most > STALL_US_MAX / 2:
                    pool.note(f"a stall of {most / 1e3:.0f} ms, of which the host's {late_us / 1e3:.0f} ms, under pager", pid)
            # The one that takes a server's memory has no parity, and stays without memory at times.
            if pager.get("protection"):
                assert pager["protection"]["lost_pages"] == 0, pager

    until = time.monotonic() + SECONDS
    with Lateness() as lateness:
        while time.monotonic() < until:
            pool.once(dice)
            look(lateness)
        over.set()
        for workload in workloads:
            workload.join(SLACK_SECONDS)
            assert not workload.is_alive(), f"{workload.name} does not end"
        look(lateness)
    eventually(pool.healthy, "all groups to be whole", 60, 0.2)
    print({workload.name: workload.rounds for workload in workloads}, pool.protections(), stalls)
    assert all(workload.rounds > 0 for workload in workloads)
    filled.ask("verify", 60)
    for at in range(0, len(keys), 500):
        some = keys[at : at + 500]
        assert redis.call("MGET", *some) == [value(key, version[key]) for key in some]
    stalled = {pid: us for pid, us in stalls.items() if us > STALL_US_MAX}
    assert not stalled, f"seed {seed}: the longest stall by pager, in us: {stalled}; {pool.log}"
    filled.tell("exit 0")
    assert filled.status() == 0, filled.err
    redis.stream.sendall(redis.encode("SHUTDOWN", "NOSAVE"))
    assert redis_process.wait(30) == 0

    def forgotten():
        return all(row["pages"] == 0 for row in pool.status())

    eventually(forgotten, "the memory of those that have ended to be free", LEASE + 30, 0.5)
