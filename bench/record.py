"""What the scripts here share: common options, their end by a signal, progress, how certain a median is, what they measured on, and how
a record of it is kept."""

import argparse
import datetime
import json
import math
import os
import pathlib
import platform
import signal
import subprocess
import sys

REPOSITORY = pathlib.Path(__file__).resolve().parents[1]
ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def add_options(parser):
    """Which build is measured, and where the record goes."""
    add_spillway(parser)
    add_record(parser)


def add_record(parser):
    """Where the record goes."""
    parser.add_argument("--record", metavar="NAME")
    parser.add_argument("--into", metavar="DIRECTORY", type=pathlib.Path, default=REPOSITORY / "docs/bench", help="for --record")


def add_spillway(parser):
    """Which build is measured."""
    default = os.environ.get("SPILLWAY", str(REPOSITORY / "target/release/spillway"))
    # Made absolute: a Path of `./spillway` is `spillway`, which would be looked for in $PATH.
    parser.add_argument("--spillway", metavar="PATH", default=default, type=lambda text: pathlib.Path(text).resolve())


def round_count(text):
    """How often all is measured."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError("give at least one round")
    return int(text)


def build(text):
    """A build and what it is called, from `NAME=PATH`."""
    name, is_one, path = text.partition("=")
    path = pathlib.Path(path).resolve()
    if not (name and is_one and os.access(path, os.X_OK) and path.is_file()):
        raise argparse.ArgumentTypeError(f"`{text}` is no NAME=PATH of a binary")
    return name, path


def add_builds(parser):
    """Builds that are compared."""
    help = "the first is what the others are told by"
    parser.add_argument("builds", metavar="NAME=PATH", type=build, nargs="+", help=help)


def exit_on_signals():
    """Ended from outside, a script still cleans up, and nobody's impatience keeps it from that."""

    def leave(number, _frame):
        for ending in ENDINGS:
            signal.signal(ending, signal.SIG_IGN)
        sys.exit(128 + number)

    for ending in ENDINGS:
        signal.signal(ending, leave)


def in_turn(cases, turn):
    """All of them, of which another one comes first at each turn: whoever is first finds colder caches."""
    at = turn % len(cases)
    return [*cases[at:], *cases[:at]]


def progress(text):
    """What is being measured, on a terminal only."""
    if sys.stderr.isatty():
        print(f"\r{text:70}\r", end="", file=sys.stderr, flush=True)


def interval(values):
    """Between which values the median is with 95% certainty, whatever the distribution; the extremes below six values."""
    count, values = len(values), sorted(values)
    below, rank = 0.0, 0
    while (below := below + math.comb(count, rank) / 2**count) <= 0.025:
        rank += 1
    rank = max(rank, 1)
    return values[rank - 1], values[count - rank]


def verdict(ratio, bound):
    """Whether a goal is met, where the spread lets that be told."""
    median, least, most = ratio
    answer = "met" if median <= bound else "**missed**"
    return answer if (least <= bound) == (most <= bound) else f"{answer}, within the spread"


def machine():
    """The machine, the kernel and the commit."""
    cpu = next((line.split(":", 1)[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), platform.machine())
    git = lambda *words: subprocess.run(["git", *words], cwd=REPOSITORY, capture_output=True, text=True).stdout.strip()
    # Records that were made just before change nothing of what is measured.
    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!docs/bench")
    commit = git("describe", "--always") + ("-dirty" if changed else "")
    return {"date": datetime.date.today().isoformat(), "commit": commit, "kernel": platform.release(), "cpu": cpu, "cpus": os.cpu_count()}


def measured_on(about, by=None):
    """The sentence that tells of the machine, and by which command it was measured."""
    command = f"; by {by}" if by else ""
    return f"{about['cpu']}, {about['cpus']} CPUs, Linux {about['kernel']}; commit {about['commit']}, {about['date']}{command}."


def keep(given, title, lines, about, figures, indent=1):
    """Writes a page of the lines, and the machine and all figures as JSON beside it, if there is to be a record."""
    if not given.record:
        return
    given.into.mkdir(parents=True, exist_ok=True)
    (given.into / f"{given.record}.md").write_text("\n".join([f"# {title}", "", *lines]).rstrip() + "\n")
    (given.into / f"{given.record}.json").write_text(json.dumps({"machine": about} | figures, indent=indent) + "\n")
