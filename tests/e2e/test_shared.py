"""Memory that several processes have mapped, under `--shared-memory`: it leaves and returns, and no byte is wrong.

tests/programs/sharers.c is most of the programs; it checks each page, and says what it saw.
"""

import concurrent.futures
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import guests
import pytest
from guests import Console
from harness import MIB, PEAK_ALLOWANCE, eventually, half, status_field
from lacking import give_up
from mechanics import UNSTOPPABLE, Program, has_agent, let_go, out_of, registered
from test_daemon import daemon  # noqa: F401
from test_takeover import nothing_of_ours

SECONDS = float(os.environ.get("SPILLWAY_TORTURE_SECONDS", "4"))
PAGES_A_MIB = MIB // 4096
# What a program maps and fills before the pager has seen it, and all who have it mapped. The programs here fill slowly.
SLACK_BYTES = 16 * MIB
NOBODY = 65534
# What `run` and `attach` are told.
SHARED = "--shared-memory"


@pytest.fixture
def sharers(build):
    return build("sharers", "-Wshadow")


def seed():
    """Another one each time, which a failure prints with the command."""
    return int(os.environ.get("SPILLWAY_TORTURE_SEED", "0")) or time.time_ns() // 1_000_000 % 1_000_000_000


class Family:
    """`sharers` in a mode, natively or under `spillway run`."""

    def __init__(self, processes, tmp_path, argv, spillway=None, local=None, options=(SHARED,)):
        print("sharers", *argv[1:])
        self.stats, self.local = tmp_path / "stats.json", local
        options = [*options, "--stats", self.stats]
        given = (spillway, f"{local}M", options) if spillway else ()
        self.program = Program(processes, argv, *given, cwd=tmp_path).ready()
        self.pid = self.program.pid

    def go(self, seconds=SECONDS):
        """Has it work for its time; returns what it counted."""
        said = self.program.ask("go", seconds + 60)
        return {name: int(count) for name, count in (line.split() for line in said if not line.startswith("NOTE"))}

    def resident(self):
        """How many pages of its shared memory are there, as the kernel says: of those that are to be locked, of all."""
        (said,) = self.program.ask("resident")
        return tuple(map(int, said.split()[1:]))

    def end(self):
        """Lets it end, which it must do as it was told to; returns the counters."""
        self.program.unharmed()
        self.program.tell("exit 7")
        assert self.program.status() == 7, self.program.err
        return json.loads(self.stats.read_text()) if self.stats.exists() else {}

    def end_paged(self):
        """The same, of one that paged."""
        stats = self.end()
        assert stats["evicted_pages"] > 5000 and stats["fetched_pages"] > 5000, stats
        return stats

    def end_within_budget(self):
        """The same, of one that kept to its budget, too."""
        stats = self.end_paged()
        assert stats["local_peak_bytes"] <= PEAK_ALLOWANCE * self.local * MIB + SLACK_BYTES, stats

    def must_live(self):
        """That it has not ended; what it said is told otherwise."""
        if self.program.process.poll() is not None:
            pytest.fail(f"it ended: {[line for line in self.program.lines.queue if line]}, {self.program.err.decode()}")

    def is_within_budget(self):
        """Whether no more of its shared memory is there than may be."""
        return self.resident()[1] * 4096 <= PEAK_ALLOWANCE * self.local * MIB


@pytest.fixture
def family(processes, spillway, sharers, tmp_path):
    """`family(MiB local, mode, argument…)` is one under `spillway run`."""
    return lambda local, *words: Family(processes, tmp_path, [sharers, *words], spillway, local)


@pytest.fixture
def native_family(processes, sharers, tmp_path):
    """`native_family(mode, argument…)` is one without Spillway."""
    return lambda *words: Family(processes, tmp_path, [sharers, *words])


def shared_files(pid):
    """The files of memory that a process has open or mapped, each by its device and inode."""
    maps = [line.split() for line in pathlib.Path(f"/proc/{pid}/maps").read_text().splitlines() if " (deleted)" in line]
    descriptors = [os.stat(path) for path in pathlib.Path(f"/proc/{pid}/fd").iterdir() if " (deleted)" in os.readlink(path)]
    return {(words[3], int(words[4])) for words in maps} | {("", about.st_ino) for about in descriptors}


def attach(spillway, family, local, *arguments):
    """Adopts a family as it is."""
    family.must_live()
    family.local = local
    return spillway.attach(family.pid, f"{local}M", SHARED, *arguments)


# ---- processes that share memory


@pytest.mark.limit(int(SECONDS + 110))
@pytest.mark.parametrize("local", [16, 32], ids=["a quarter", "half"])
@pytest.mark.parametrize("mode", ["anonymous", "memfd"])
def test_under_a_budget(family, mode, local):
    whole = family(local, mode, 64, 3, SECONDS, seed())
    eventually(whole.is_within_budget, "what was filled to leave")
    counted = whole.go()
    assert counted["looks"] > 10000 and counted["writes"] > 1000 and counted["removals"] > 20, counted
    # README.md, Limits: mremap may refuse what was mapped at one time, now and then.
    assert counted["moves"] > 20 and counted["apart"] <= 1 + counted["moves"] // 100, counted
    eventually(whole.is_within_budget, "what was used to leave")
    whole.end_within_budget()


@pytest.mark.limit(130)
def test_strangers_that_come_late(family):
    """A memfd can be handed to anyone. Who maps one is seen some time afterwards, and has its pages from then on."""
    whole = family(16, "memfd", 64, 2, max(SECONDS, 10), seed(), "with=late")
    # Without those that the program began with, its stranger's place counted.
    assert whole.go(max(SECONDS, 10))["born"] > 4 + 2
    # Nothing leaves until the last that came is known, so that the budget does not hold meanwhile.
    eventually(whole.is_within_budget, "what was used to leave")
    whole.end_paged()


# Each page a mapping of its own, about as many as a process may have.
MANY_MAPPINGS = """
import ctypes, mmap, sys
PAGES = 60000
memory = mmap.mmap(-1, PAGES * 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
at = ctypes.addressof(ctypes.c_char.from_buffer(memory))
for page in range(0, PAGES, 2):
    if ctypes.CDLL(None).mprotect(ctypes.c_void_p(at + page * 4096), ctypes.c_size_t(4096), mmap.PROT_READ):
        sys.exit("mprotect")
print("HAS", flush=True)
sys.stdin.read()
"""


@pytest.mark.limit(130)
def test_strangers_that_come_late_to_a_machine_with_many_mappings(processes, family):
    """All processes are looked through for them: however long that takes, the next look is not put off for it."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    others = [processes.start([sys.executable, "-c", MANY_MAPPINGS], **pipes) for _ in range(4)]
    for other in others:
        assert other.stdout.readline() == b"HAS\n"
    whole = family(16, "memfd", 64, 2, max(SECONDS, 10), seed(), "with=late")
    assert whole.go(max(SECONDS, 10))["born"] > 4 + 2
    whole.end_paged()


PATTERN = """
def pattern(page):
    return (page + 1).to_bytes(8, "little") * 512
"""
OWNER = PATTERN + """
import mmap, os, sys
pages = 48 * 256
file = os.memfd_create("owned")
os.ftruncate(file, pages * 4096)
memory = mmap.mmap(file, pages * 4096)
for page in range(pages):
    memory[page * 4096 : page * 4096 + 4096] = pattern(page)
print("READY", flush=True)
sys.stdin.read()
"""
STRANGER = UNSTOPPABLE + PATTERN + """
import mmap, sys
memory = mmap.mmap(os.open(sys.argv[1], os.O_RDWR), 0)
be_unstoppable(3, lambda: None)
time.sleep(1)
wrong = sum(memory[page * 4096 : page * 4096 + 4096] != pattern(page) for page in range(len(memory) // 4096))
print(f"BAD {wrong} pages" if wrong else "OK", flush=True)
"""


@pytest.mark.limit(90)
def test_a_stranger_that_does_not_stop_at_first(processes, spillway):
    """It was tried again, found to be traced, by its pager, refused for ever, and read zeros."""
    owner = Program(processes, [sys.executable, "-c", OWNER], spillway, "16M", [SHARED]).ready()
    pid = owner.pid
    eventually(lambda: int(status_field(pid, "RssShmem").split()[0]) * 1024 < 20 * MIB, "most of it to leave")
    files = pathlib.Path(f"/proc/{pid}/fd").iterdir()
    file = next(path for path in files if "memfd:owned" in os.readlink(path))
    stranger = Program(processes, [sys.executable, "-c", STRANGER, file])
    assert stranger.line() == "OK"
    assert stranger.status() == 0
    owner.process.stdin.close()
    assert owner.status() == 0


@pytest.mark.limit(int(SECONDS + 110))
@pytest.mark.parametrize("mode", ["anonymous", "memfd"])
def test_adopted_and_let_go(spillway, native_family, mode):
    # Pages of zeros need not come home: they are read as such. So none are made.
    whole = native_family(mode, 64, 3, SECONDS, seed(), "without=remove")
    attached = attach(spillway, whole, 16)
    eventually(whole.is_within_budget, "most of it to leave")
    whole.go()
    assert spillway.find(whole.pid)["evicted_pages"] > 5000
    eventually(whole.is_within_budget, "most of it to leave")
    whole.program.unharmed()
    spillway.detach(whole.pid)
    assert attached.finish(timeout=20).status == 0
    assert whole.resident()[1] == 64 * PAGES_A_MIB
    assert registered(whole.pid) == 0
    nothing_of_ours(whole.pid)
    # It lives on.
    whole.program.unharmed()
    whole.go()
    whole.end()


@pytest.mark.limit(120)
@pytest.mark.parametrize("mode", ["anonymous", "memfd"])
def test_adopted_and_let_go_while_it_works(spillway, native_family, mode):
    """Its children come and go meanwhile."""
    whole = native_family(mode, 64, 3, 20, seed())
    whole.program.tell("go")
    evicted = 0
    for local in (16, 32, 8):
        time.sleep(0.3)
        attached = attach(spillway, whole, local)
        time.sleep(2.5)
        whole.must_live()
        # Nothing leaves before all are adopted, which takes the longer the busier the machine is.
        eventually(lambda: spillway.find(whole.pid)["evicted_pages"] > 1500, "some of it to leave", 20, every=0.1)
        whole.must_live()
        evicted += let_go(attached, 60).stats["evicted_pages"]
        assert registered(whole.pid) == 0
    assert evicted > 5000
    while (line := whole.program.line(60)) != "OK":
        assert not line.startswith("BAD"), line
    nothing_of_ours(whole.pid)
    whole.end()


@pytest.mark.limit(120)
def test_children_that_are_being_born_as_their_parent_is_adopted_are_waited_for(processes, spillway, build, tmp_path):
    """A child that is being forked has what its parent had mapped, and is in no list yet. Forks that took longer than two looks were not
    waited for: pages left, the child read zeros in their place, and from then on so did everyone."""
    program = Program(processes, [build("newborns", "-Wshadow"), 32, tmp_path]).ready()
    program.tell("go 14")
    evicted = 0
    for _ in range(20):
        attached = spillway.attach(program.pid, "4M", SHARED)
        time.sleep(0.4)
        evicted += let_go(attached, 60).stats["evicted_pages"]
    assert evicted > 5000
    assert program.line(60) == "OK"
    program.unharmed()
    program.tell("exit 7")
    assert program.status() == 7, program.err


@pytest.mark.limit(120)
def test_a_stranger_of_another_tree(processes, spillway, native_family, sharers, tmp_path):
    """Who is adopted is one process; who has mapped the same memfd is managed with it, and let go with it."""
    name = f"sharers-test-{os.getpid()}"
    whole = native_family("memfd", 64, 2, SECONDS, seed(), f"socket={name}", "without=remove")
    whole.program.tell("attend")
    stranger = Program(processes, [sharers, "stranger", name, "without=remove"], cwd=tmp_path).ready()
    assert whole.program.line() == "OK"
    attached = attach(spillway, whole, 16)
    eventually(lambda: registered(stranger.pid) > 0, "the stranger's mapping to be registered")
    eventually(whole.is_within_budget, "most of it to leave")
    stranger.unharmed()
    whole.go()
    stranger.unharmed()
    assert spillway.find(whole.pid)["evicted_pages"] > 5000
    spillway.detach(whole.pid)
    assert attached.finish(timeout=20).status == 0
    eventually(lambda: registered(stranger.pid) == 0 and not has_agent(stranger.pid), "the stranger to be let go")
    assert whole.resident()[1] == 64 * PAGES_A_MIB
    stranger.unharmed()
    stranger.tell("exit")
    assert stranger.status() == 0
    whole.end()


@pytest.mark.parametrize("views", [1, 2])
def test_a_memfd_that_is_mapped_again_at_its_place_is_managed_again(processes, spillway, build, views):
    mib, local = 32, 8
    program = Program(processes, [build("again"), mib, *["twice"] * (views - 1)], spillway, f"{local}M", [SHARED]).ready()
    memfd = next(path for path in pathlib.Path(f"/proc/{program.pid}/fd").iterdir() if "/memfd:again" in os.readlink(path))
    there = lambda: os.stat(memfd).st_blocks * 512
    for _ in range(2):
        eventually(lambda: there() <= PEAK_ALLOWANCE * local * MIB, "most of it to leave")
        program.ask("unmap")
        if views == 1:
            # Nobody has it mapped, and it is open: all of it comes home but what is zeros.
            eventually(lambda: not out_of(memfd, mib), "all of it to come home")
            program.ask("map")
        else:
            program.ask("map")
            # What is mapped while some of it is out is found by looking.
            time.sleep(2)
        program.unharmed()
    eventually(lambda: there() <= PEAK_ALLOWANCE * local * MIB, "most of it to leave")
    program.unharmed()
    program.tell("exit 7")
    assert program.status() == 7, program.err


@pytest.mark.limit(int(2 * SECONDS + 60))
@pytest.mark.parametrize("mode", ["anonymous", "memfd"])
def test_a_daemon_lets_go_of_it(processes, spillway, daemon, native_family, sharers, tmp_path, mode):
    """A daemon goes on when its targets do not: nothing of theirs must stay with it."""
    daemon.start("--local", "16M", SHARED)
    before = shared_files(daemon.pid)
    name = f"sharers-test-{os.getpid()}"
    whole = native_family(mode, 64, 3, SECONDS, seed(), "without=remove", f"socket={name}")
    whole.local = 16
    if mode == "memfd":
        whole.program.tell("attend")
        stranger = Program(processes, [sharers, "stranger", name, "without=remove"], cwd=tmp_path).ready()
        assert whole.program.line() == "OK"
    # And all of them are taken again.
    for _ in range(2):
        done = spillway.cli("attach", whole.pid)
        assert done.returncode == 0, done.stderr
        eventually(whole.is_within_budget, "most of it to leave")
        assert mode != "memfd" or registered(stranger.pid) > 0
        whole.go()
        assert spillway.find(whole.pid)["evicted_pages"] > 5000
        done = spillway.cli("detach", whole.pid)
        assert done.returncode == 0, done.stderr
        assert whole.resident()[1] == 64 * PAGES_A_MIB and registered(whole.pid) == 0
        nothing_of_ours(whole.pid)
        eventually(lambda: shared_files(daemon.pid) == before, "the daemon to let go of the file")
    whole.program.unharmed()
    whole.end()


def test_another_budget_is_kept_at_once(spillway, native_family):
    whole = native_family("anonymous", 64, 2, 2, seed())
    attach(spillway, whole, 48)
    for local in (8, 32, 16):
        whole.local = local
        spillway.resize(whole.pid, f"{local}M")
        eventually(whole.is_within_budget, f"no more than {local} MiB to be there")
        whole.go(2)
    spillway.detach(whole.pid)
    whole.end()


def test_nothing_of_it_is_managed_unless_one_says_so(processes, spillway, sharers, tmp_path):
    argv = [sharers, "anonymous", 48, 2, 1, seed(), "without=remove"]
    whole = Family(processes, tmp_path, argv, spillway, 16, options=())
    whole.go(1)
    assert whole.resident()[1] == 48 * PAGES_A_MIB
    assert whole.end()["evicted_pages"] < 1000


# ---- what the kernel holds on to, and what it reads and writes itself


@pytest.mark.limit(int(SECONDS + 110))
def test_pages_that_the_kernel_holds_stay(family):
    # docs/SHARED.md: a page that a pipe is given as it leaves stays in it as it was.
    whole = family(16, "pinned", 64, SECONDS, seed(), "without=later")
    whole.go()
    whole.end_within_budget()


@pytest.mark.limit(120)
def test_locked_pages_stay(family):
    locked = 8 * PAGES_A_MIB
    whole = family(16, "locked", 64, 8, 2, seed())
    eventually(whole.is_within_budget, "what was filled to leave")
    whole.program.ask("lock")
    for _ in range(2):
        assert whole.resident()[0] == locked
        whole.go(2)
    assert whole.resident()[0] == locked
    whole.program.ask("unlock")
    # They may leave again.
    whole.go(2)
    eventually(lambda: whole.resident()[0] < locked, "pages that are not locked any more to leave")
    eventually(whole.is_within_budget, "what was used to leave")
    whole.end_within_budget()


@pytest.mark.limit(200)
def test_system_calls_on_what_has_left(family):
    whole = family(8, "syscalls", 16, seed())
    # Of some 20 times 384 pages that a call needed when they were out; a few may have been in use.
    assert whole.program.ask("go", 180)[-1].startswith("COLD ")
    whole.end()


WRITERS = [["private"], ["shared"], ["private", "busy"], ["shared", "busy"]]


def writer(processes, build, tmp_path, how, *spillway_and_budget):
    """`writer`, natively or under `spillway run`, and where its counters come."""
    stats = tmp_path / "stats.json"
    options = (*spillway_and_budget, [SHARED, "--stats", stats]) if spillway_and_budget else ()
    source, *busy = how
    return Program(processes, [build("writer"), source, 16, SECONDS, *busy], *options).ready(), stats


def wrote(program):
    """How many pages it writes in its time, in which it must end; nothing of it is harmed."""
    (said,) = program.ask("go", SECONDS + 30)
    program.unharmed()
    program.tell("exit 7")
    assert program.status() == 7, program.err
    return int(said.split()[1])


@pytest.mark.limit(int(SECONDS + 60))
@pytest.mark.parametrize("how", WRITERS, ids=" ".join)
def test_who_writes_to_a_memfd_from_memory_that_has_left_holds_nobody_up(processes, spillway, build, tmp_path, how):
    program, stats = writer(processes, build, tmp_path, how, spillway, "16M")
    assert wrote(program) > 500
    told = json.loads(stats.read_text())
    assert told["evicted_pages"] > 2000 and told["fetched_pages"] > 2000, told


# ---- the program itself: that it is right without a pager, and not blind

MODES = {
    "anonymous": ["anonymous", 32, 3, 2],
    "memfd": ["memfd", 32, 3, 2],
    "twin": ["anonymous", 32, 3, 2],
    "pinned": ["pinned", 16, 2],
    "locked": ["locked", 16, 4, 2],
}


@pytest.mark.parametrize("mode", MODES)
def test_natively(native_family, mode):
    options = ["with=twin"] if mode == "twin" else []
    whole = native_family(*MODES[mode], seed(), *options)
    counted = whole.go(2)
    assert counted.get("apart", 0) == 0, counted
    if mode == "locked":
        whole.program.ask("lock")
        assert whole.resident() == (4 * PAGES_A_MIB, 16 * PAGES_A_MIB)
    whole.end()


def test_system_calls_natively(native_family):
    whole = native_family("syscalls", 16, seed(), "native")
    assert whole.go(20)["COLD"] == 0
    whole.end()


@pytest.mark.parametrize("how", WRITERS, ids=" ".join)
def test_writes_to_a_memfd_natively(processes, build, tmp_path, how):
    assert wrote(writer(processes, build, tmp_path, how)[0]) > 500


SABOTAGE = [(mode, kind) for mode in ("anonymous", "memfd") for kind in ("zero", "flip", "half", "stale", "revive")]


@pytest.mark.parametrize(("mode", "kind"), [*SABOTAGE, ("pinned", "zero"), ("pinned", "orphan"), ("syscalls", "zero")])
def test_sabotage_is_noticed(processes, sharers, tmp_path, mode, kind):
    argv = {"pinned": ["pinned", 16, 8], "syscalls": ["syscalls", 16]}.get(mode, [mode, 16, 2, 8])
    program = Program(processes, [sharers, *argv, 11, f"sabotage={kind}", "native"], cwd=tmp_path).ready()
    program.tell("go")
    assert program.line().startswith("BAD ")
    assert program.status() == 1


# ---- real programs

# Each process fills its part of the memory, and looks at another's, round by round.
PYTHON = """
import hashlib, mmap, multiprocessing, random
workers, rounds = 3, 4
memory = mmap.mmap(-1, 96 << 20)
part = len(memory) // workers
quarter = part // 4

def content(worker, round):
    noise = random.Random(f"{worker}:{round}").randbytes(quarter)
    text = b"%d of round %d " % (worker, round)
    return noise + (text * (quarter // len(text) + 1))[:quarter] + noise[::-1] + bytes(quarter)

def digest(data):
    return hashlib.sha256(data).hexdigest()

def work(worker, barrier):
    for round in range(rounds):
        memory[worker * part : (worker + 1) * part] = content(worker, round)
        barrier.wait()
        other = (worker + 1) % workers
        seen = digest(memoryview(memory)[other * part : (other + 1) * part])
        assert seen == digest(content(other, round)), (worker, other, round)
        barrier.wait()

context = multiprocessing.get_context("fork")
barrier = context.Barrier(workers)
children = [context.Process(target=work, args=(worker, barrier)) for worker in range(workers)]
for child in children:
    child.start()
for child in children:
    child.join()
print([child.exitcode for child in children], digest(memory))
"""


@pytest.mark.limit(150)
def test_processes_of_python(native, spillway):
    command = [sys.executable, "-c", PYTHON]
    plain = native.run(command).must_succeed()
    assert plain.out.startswith("[0, 0, 0] "), plain.out
    budget = 64 * MIB
    done = spillway.run(command, budget, SHARED, timeout=120).must_succeed()
    assert done.out == plain.out, done.err
    assert done.stats["evicted_pages"] > 5000 and done.stats["fetched_pages"] > 5000, done.stats
    # They fill it faster than it is found.
    assert done.stats["local_peak_bytes"] <= PEAK_ALLOWANCE * budget + 48 * MIB, done.stats


class Postgres:
    """A server in a directory of its own, of a user who is not root, and its clients."""

    def __init__(self, programs, setpriv, directory):
        self.programs, self.directory, self.data = programs, directory, directory / "data"
        self.rights = [setpriv, f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
        self.client("initdb", "-D", self.data, "-U", "postgres", "-A", "trust", "-E", "UTF8", "--no-locale", "-k", "-N")

    def words(self, program, *arguments):
        """A command of that user's."""
        return [str(word) for word in (*self.rights, self.programs / program, *arguments)]

    def client(self, program, *arguments):
        """Runs a program to its end, which must be good."""
        command, options = self.words(program, *arguments), {"stdin": subprocess.DEVNULL, "cwd": self.directory}
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, **options)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def server(self):
        """Its command. What it keeps in `shared_buffers` is mapped anonymous and shared, before it forks."""
        settings = ["shared_buffers=128MB", "huge_pages=off", "shared_memory_type=mmap", "listen_addresses="]
        settings += [f"unix_socket_directories={self.directory}", "fsync=off", "jit=off", "max_wal_size=2GB"]
        return self.words("postgres", "-D", self.data, *(word for each in settings for word in ("-c", each)))

    def bench(self, *arguments):
        """pgbench."""
        return self.client("pgbench", "-h", self.directory, "-U", "postgres", *arguments, "postgres")

    def ask(self, query):
        """The rows that a query gives, as text."""
        whom = ["-h", self.directory, "-U", "postgres", "postgres"]
        return self.client("psql", "-X", "-A", "-t", "-c", query, *whom).split()

    def is_ready(self):
        """Whether it answers."""
        command = self.words("pg_isready", "-h", self.directory, "-q")
        return subprocess.run(command, stdin=subprocess.DEVNULL, timeout=20, cwd=self.directory).returncode == 0


@pytest.fixture
def postgres(processes, need):
    (setpriv,) = need("setpriv")
    found = sorted(pathlib.Path("/usr/lib/postgresql").glob("*/bin/pgbench"))
    if not found:
        give_up("no PostgreSQL: scripts/setup-tests installs it")
    directory = pathlib.Path(tempfile.mkdtemp())  # pytest's own directories are closed to other users
    os.chown(directory, NOBODY, NOBODY)
    yield Postgres(found[-1].parent, setpriv, directory)
    processes.end()
    shutil.rmtree(directory)


SUMS = """SELECT count(*), sum(abalance), sum(hashtext(a::text)::bigint) FROM pgbench_accounts a;
SELECT count(*), sum(delta), sum(hashtext(h::text)::bigint) FROM pgbench_history h;
SELECT sum(bbalance) FROM pgbench_branches; SELECT sum(tbalance) FROM pgbench_tellers"""


def sums_of(postgres):
    """What all tables add up to, which must be the same for each."""
    (accounts, history, branches, tellers) = (line.split("|") for line in postgres.ask(SUMS))
    assert accounts[0] == "800000", accounts
    assert accounts[1] == history[1] == branches[0] == tellers[0], (accounts, history, branches, tellers)
    return accounts, history


def stop(postgres, running):
    """Ends a server as it wants to be ended."""
    os.kill(running.pid, signal.SIGINT)
    return running.finish(timeout=40).must_succeed()


@pytest.mark.limit(200)
@pytest.mark.parametrize("how", ["run", "attach"])
def test_postgres(native, spillway, postgres, how):
    budget = 48 * MIB
    running = spillway.start(postgres.server(), budget, SHARED) if how == "run" else native.start(postgres.server())
    eventually(postgres.is_ready, "PostgreSQL to answer", 30)
    postgres.bench("-i", "-s", 8, "-q")
    attached = None if how == "run" else spillway.attach(running.pid, budget, SHARED)
    for _ in range(6):
        told = postgres.bench("-T", 5, "-c", 4, "-n")
        assert "number of failed transactions: 0 " in told, told
        entry = spillway.find(running.pid)
        if entry["evicted_pages"] > 5000 and entry["fetched_pages"] > 1000:
            break
    assert entry["evicted_pages"] > 5000 and entry["fetched_pages"] > 1000, entry
    if attached:
        with concurrent.futures.ThreadPoolExecutor() as beside:
            told = beside.submit(postgres.bench, "-T", 5, "-c", 4, "-n")
            for _ in range(3):
                time.sleep(1.2)
                attached.process.kill()
                attached.process.wait(5)
                attached = spillway.begin_attach(running.pid)
            assert "number of failed transactions: 0 " in told.result(), told.result()
    within = sums_of(postgres)
    if attached:
        spillway.detach(running.pid)
        assert attached.finish(timeout=30).status == 0
        assert sums_of(postgres) == within
    stats = stop(postgres, running).stats
    # Each backend that is forked has pages of its own, which are found by looking.
    assert not stats or stats["local_peak_bytes"] <= PEAK_ALLOWANCE * budget + 48 * MIB, stats
    # What it has written to disk is what it had in memory.
    running = native.start(postgres.server())
    eventually(postgres.is_ready, "PostgreSQL to answer", 30)
    assert sums_of(postgres) == within
    stop(postgres, running)


# ---- a guest whose memory its monitor shares

GUEST_MIB, FILLED_MIB = 256, 160


def in_a_memfd(mib):
    """What QEMU is told so that a guest's memory can be shared."""
    return ["-object", f"memory-backend-memfd,id=m,size={mib}M,share=on", "-machine", "memory-backend=m"]


@pytest.fixture(scope="module")
def guest(tools, tmp_path_factory):
    """The command of a guest in a memfd."""
    image = guests.Image(tmp_path_factory.mktemp("guest"))
    return guests.command(image, GUEST_MIB, FILLED_MIB, *in_a_memfd(GUEST_MIB))


def file_bytes(pid):
    """How much of a guest's memory takes memory, whoever has it in page tables: what the kernel says of the memfd."""
    first = guests.Memory(pid, GUEST_MIB).first * 4096
    return os.stat(f"/proc/{pid}/map_files/{first:x}-{first + GUEST_MIB * MIB:x}").st_blocks * 512


@pytest.mark.limit(150)
def test_guest_in_a_memfd(spillway, guest):
    budget = half(GUEST_MIB * MIB)
    running = spillway.start(guest, budget, SHARED, stdin=subprocess.PIPE)
    console = Console(running)
    for _ in range(2):
        before = console.filled()
        time.sleep(1)  # an idle guest: what is cold leaves
        assert console.verified() == before
    eventually(lambda: file_bytes(running.pid) <= PEAK_ALLOWANCE * budget, "the guest to be within its budget")
    console.filled()
    console.power_off()
    stats = running.finish(timeout=20).must_succeed().stats
    assert stats["evicted_pages"] > 5000 and stats["fetched_pages"] > 5000, stats
    assert stats["local_peak_bytes"] <= PEAK_ALLOWANCE * budget + SLACK_BYTES, stats


@pytest.mark.limit(150)
def test_guest_in_a_memfd_adopted_while_it_runs_and_shrunk_hard(native, spillway, guest):
    running = native.start(guest, stdin=subprocess.PIPE)
    console = Console(running)
    first = console.filled()
    whole = file_bytes(running.pid)
    assert whole >= FILLED_MIB * MIB
    memory = guests.Memory(running.pid, GUEST_MIB)
    _, own = memory.occupied()

    pager = spillway.attach(running.pid, GUEST_MIB // 2 * MIB, SHARED, "--least-mapping", f"{GUEST_MIB}M")
    assert console.verified() == first
    second = console.filled()
    small = 32 * MIB
    spillway.resize(running.pid, small)
    eventually(lambda: file_bytes(running.pid) <= PEAK_ALLOWANCE * small, "the guest to shrink", 30)
    least = (FILLED_MIB - 40) * MIB
    # What has left is stored a little later.
    eventually(lambda: spillway.find(running.pid)["stored_bytes"] >= least, "what has left to be stored", 30)
    # What is QEMU's own is left alone.
    assert memory.occupied()[1] >= own * 9 // 10

    # Room enough to verify at speed; what had left comes back by faults.
    spillway.resize(running.pid, GUEST_MIB // 2 * MIB)
    assert console.verified() == second
    assert spillway.find(running.pid)["fetched_pages"] >= FILLED_MIB * PAGES_A_MIB // 2
    third = console.filled()
    spillway.detach(running.pid)
    assert pager.finish(timeout=20).status == 0
    assert registered(running.pid) == 0
    # Pages of zeros need not be.
    assert file_bytes(running.pid) >= FILLED_MIB * MIB
    assert console.verified() == third
    console.filled()
    console.power_off()
    assert running.finish(timeout=20).status == 0


@pytest.mark.limit(200)
def test_a_guest_whose_disk_is_served_by_a_process_that_has_its_memory_mapped(native, processes, spillway, need, tools, tmp_path):
    """vhost-user: what the back end reads and writes of the guest's memory is right, and so is the disk."""
    need("qemu-storage-daemon")
    if not guests.drivers():
        give_up("no drivers for the guest: scripts/setup-tests fetches them")
    mib, disk_mib, local = 192, 64, 48 * MIB
    image, disk, socket = guests.Image(tmp_path / "guest", disk=True), tmp_path / "disk", tmp_path / "disk.sock"
    on_disk = lambda what, nth: subprocess.run([image.program, disk, str(disk_mib), what, str(nth)], timeout=60).returncode == 0
    assert on_disk("write", 0) and not on_disk("check", 1)
    export = f"type=vhost-user-blk,id=export,node-name=disk,addr.type=unix,addr.path={socket},writable=on"
    back_end = ["qemu-storage-daemon", "--blockdev", f"driver=file,node-name=disk,filename={disk}", "--export", export]
    back_end = processes.start(back_end, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    eventually(socket.exists, "the back end to listen")
    devices = ["-chardev", f"socket,id=disk,path={socket}", "-device", "vhost-user-blk-pci,chardev=disk"]
    words = guests.command(image, mib, disk_mib, *in_a_memfd(mib), *devices, drivers=guests.DISK_DRIVERS, disk="vda")
    running = native.start(words, stdin=subprocess.PIPE)
    console = Console(running)
    console.expect("ready")

    def round_is_right(nth):
        console.say("go")
        console.expect(f"round {nth} disk wrong=0")
        assert on_disk("check", nth)

    round_is_right(1)
    pager = spillway.attach(running.pid, local, SHARED, "--least-mapping", f"{mib}M")
    for nth in (2, 3, 4):
        if nth == 4:
            # Another pager takes over what both have mapped.
            pager.process.kill()
            pager.process.wait(5)
            pager = spillway.begin_attach(running.pid)
        round_is_right(nth)
        assert has_agent(back_end.pid) and has_agent(running.pid)
    entry = spillway.find(running.pid)
    assert min(entry["evicted_pages"], entry["fetched_pages"]) > disk_mib * PAGES_A_MIB, entry
    spillway.detach(running.pid)
    assert pager.finish(timeout=20).status == 0
    assert not has_agent(back_end.pid) and registered(back_end.pid) == 0
    round_is_right(5)
    console.say("stop")
    console.expect("disk ended with status 0")
    assert running.finish(timeout=20).status == 0
