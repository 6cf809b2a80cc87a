"""What figures were measured on."""

import datetime
import os
import platform
import subprocess


def machine(repository):
    """The machine, the kernel and the commit."""
    cpu = next((line.split(":", 1)[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), platform.machine())
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=repository, capture_output=True, text=True).stdout.strip()
    return {"date": datetime.date.today().isoformat(), "commit": commit, "kernel": platform.release(), "cpu": cpu, "cpus": os.cpu_count()}
