"""The scripts that a newcomer types."""

import os
import shutil
import subprocess
import sys

import pytest
from harness import REPOSITORY


def test_demo(processes, spillway):
    demo = processes.start(
        [REPOSITORY / "scripts/demo", "--mib", 160, "--spillway", spillway.path],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    out, _ = demo.communicate(timeout=80)
    assert demo.returncode == 0, out
    assert out.rstrip().splitlines()[-1].startswith("Conclusion: the same output"), out


def test_demo_where_there_is_no_python(tmp_path):
    """Nothing is installed: all that it calls is made up."""
    for tool in ("sh", "cat", "chmod"):
        (tmp_path / tool).symlink_to(shutil.which(tool))

    def told(apt_get):
        stub = tmp_path / "apt-get"
        stub.write_text(f"#!/bin/sh\n{apt_get}\n")
        stub.chmod(0o755)
        command = [shutil.which("make"), "-s", "demo", "CARGO=:"]
        done = subprocess.run(command, cwd=REPOSITORY, env={"PATH": str(tmp_path)}, capture_output=True, text=True, timeout=30)
        return done.returncode, done.stdout, done.stderr

    status, _, said = told("echo no network >&2; exit 100")
    assert status != 0 and "no network" in said and "Install python3" in said
    interpreter = f"{tmp_path}/python3"
    installs = f'case "$*" in *python3*) printf "#!/bin/sh\necho shown\n" >{interpreter}; chmod +x {interpreter};; esac'
    assert told(installs)[:2] == (0, "shown\n")


def test_scripts_are_sound():
    done = subprocess.run([REPOSITORY / "scripts/check-scripts"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_setup_is_quick_and_silent_when_all_is_there():
    done = subprocess.run([REPOSITORY / "scripts/setup-tests"], capture_output=True, text=True, timeout=30, env=os.environ)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# An interpreter that has none of what is fetched, and a pip that is offline or else makes the modules.
PYTHON = """#!/bin/sh
case "$*" in
*'-m pip'*)
    echo "pip: $*" >>{told}
    [ -e {online} ] || {{ echo no network >&2; exit 1; }}
    while [ "$1" != --target ]; do shift; done
    mkdir -p "$2/matplotlib" && touch "$2/matplotlib/__init__.py" "$2/matplotlib/pyplot.py" "$2/duckdb.py" ;;
*duckdb* | *matplotlib*) exec {python} -S "$@" ;;
*) exec {python} "$@" ;;
esac
"""


def test_setup_fetches_what_bench_takes_of_python(tmp_path):
    told, online, tools = tmp_path / "told", tmp_path / "online", tmp_path / "tools"
    tools.mkdir()
    interpreter = tools / "python3"
    interpreter.write_text(PYTHON.format(told=told, online=online, python=sys.executable))
    interpreter.chmod(0o755)
    # Else it would be fetched as well.
    (tools / "valkey-server").symlink_to("/bin/true")
    environment = os.environ | {"PATH": f"{tools}:{os.environ['PATH']}", "SPILLWAY_TEST_CACHE": str(tmp_path / "cache"), "SPILLWAY_GUEST_KERNEL": "none"}

    def set_up():
        told.write_text("")
        done = subprocess.run([REPOSITORY / "scripts/setup-tests"], capture_output=True, text=True, timeout=30, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stderr, told.read_text().splitlines()

    # Offline is no failure, and is tried again.
    for _ in range(2):
        warned, fetched = set_up()
        assert "leave it out" in warned and "no charts" in warned and warned.count("no network") == 2
        assert len(fetched) == 2
    online.touch()
    warned, fetched = set_up()
    assert warned == "" and "duckdb==" in fetched[0] and "matplotlib==" in fetched[1]
    assert (tmp_path / "cache/python/duckdb.py").exists() and (tmp_path / "cache/matplotlib/matplotlib").exists()
    assert set_up() == ("", [])


@pytest.mark.limit(300)
def test_two_builds_are_compared(processes, spillway, tmp_path):
    """With a repository of its own, so that nothing is built and nothing of this one changes."""
    git = ["git", "-C", tmp_path, "-c", "user.name=x", "-c", "user.email=x@example.org"]
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "one"], ["commit", "-q", "--allow-empty", "-m", "two"]):
        subprocess.run([*git, *command], check=True)
    (tmp_path / "scripts").mkdir()
    script = shutil.copy(REPOSITORY / "scripts/bench-ab", tmp_path / "scripts")
    commits = subprocess.run([*git, "rev-list", "HEAD"], check=True, capture_output=True, text=True).stdout.split()
    cache, tools = tmp_path / "cache", tmp_path / "tools"
    tools.mkdir()
    cargo = tools / "cargo"
    cargo.write_text(f'#!/bin/sh\nset -e\nmkdir -p "$CARGO_TARGET_DIR/release"\ncp "{spillway.path}" "$CARGO_TARGET_DIR/release/spillway"\necho built "$@"\n')
    cargo.chmod(0o755)

    told = tools / "spillway"
    told.write_text('#!/bin/sh\necho compares "$@"\n')
    told.chmod(0o755)

    def ran(*words, build=told):
        environment = {name: value for name, value in os.environ.items() if name != "CARGO_TARGET_DIR"}
        environment |= {"SPILLWAY": str(build), "SPILLWAY_BENCH_CACHE": str(cache), "PATH": f"{tools}:{os.environ['PATH']}"}
        run = processes.start([script, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
        out, _ = run.communicate(timeout=200)
        return run.returncode, out

    assert ran() == (2, "bench-ab: which revision? make bench-ab BASE=HEAD~1\n")
    status, out = ran("nowhere")
    assert status == 2 and "has no revision nowhere" in out
    status, out = ran("--cached")
    assert status == 0 and "compared with itself" in out and f"--against {cache / commits[0] / 'spillway'} " in out, out
    status, out = ran("HEAD~1", "--order", "sequential")
    assert status == 0 and "built build --release --bin spillway" in out, out
    assert f"--against {cache / commits[1] / 'spillway'} " in out and "--order sequential" in out, out
    assert subprocess.run([*git, "worktree", "list"], check=True, capture_output=True, text=True).stdout.count("\n") == 1
    status, out = ran("--cached", build=spillway.path)
    assert status == 0 and "against " in out and " one\n" in out, out
    assert out.count("this build to base") == 2 and "Wrong bytes: none." in out, out
