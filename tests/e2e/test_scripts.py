"""The scripts that a newcomer types."""

import os
import subprocess

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


def test_scripts_are_sound():
    done = subprocess.run([REPOSITORY / "scripts/check-scripts"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_setup_is_quick_and_silent_when_all_is_there():
    done = subprocess.run([REPOSITORY / "scripts/setup-tests"], capture_output=True, text=True, timeout=30, env=os.environ)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
