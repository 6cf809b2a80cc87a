"""The facts of docs/KERNEL.md, each seen to be so on this kernel: tests/kernel, one process a fact.

A fact that this kernel is too old for, or that cannot be seen here, is skipped and says why.
"""

import re
import subprocess

import pytest
from harness import REPOSITORY

pytestmark = pytest.mark.alone

SOURCES = REPOSITORY / "tests/kernel"
PAGE = REPOSITORY / "docs/KERNEL.md"
CANNOT_BE_SEEN = 77


def facts():
    """The facts' names and the files they are in."""
    for source in sorted(SOURCES.glob("*.c")):
        for name in re.findall(r"^FACT\((\w+)\)", source.read_text(), re.MULTILINE):
            yield name, source


FACTS = dict(facts())


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    """`compiled(source)` gives the program made of one file, compiled once a session."""
    directory = tmp_path_factory.mktemp("kernel")
    programs = {}

    def program(source):
        if source not in programs:
            made = directory / source.stem
            flags = ["-O2", "-g", "-Wall", "-Wextra", "-Wshadow", "-Wno-unused-function", "-Werror", "-pthread"]
            done = subprocess.run(["cc", *flags, "-o", made, source], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=60)
            assert done.returncode == 0, done.stderr
            programs[source] = made
        return programs[source]

    return program


@pytest.mark.limit(60)
@pytest.mark.parametrize("fact", FACTS)
def test(fact, compiled):
    program = compiled(FACTS[fact])
    done = subprocess.run([program, fact], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=30)
    print(done.stdout)
    if done.returncode == CANNOT_BE_SEEN:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stdout


def test_the_page_names_each_fact_once():
    """docs/KERNEL.md and the tests agree on what is pinned; what is only stated says so and has no test."""
    rows = re.findall(r"^\| `(\w+)` \|.*\| ([^|]*) \|$", PAGE.read_text(), re.MULTILINE)
    pinned = [name for name, test in rows if test != "stated"]
    assert sorted(pinned) == sorted(FACTS)
    for name, file in rows:
        assert file == "stated" or FACTS[name].name == file, name
