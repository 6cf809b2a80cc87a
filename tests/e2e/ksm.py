"""The kernel's thread that merges equal pages, as tests and measurements have it."""

import contextlib
import pathlib
import time

KSM = pathlib.Path("/sys/kernel/mm/ksm")


def is_there():
    return (KSM / "run").exists()


def set_knobs(**values):
    for knob, value in values.items():
        (KSM / knob).write_text(str(value))


def counter(name):
    return int((KSM / name).read_text())


@contextlib.contextmanager
def at_work(**knobs):
    """It merges, with these settings where the kernel has them; what was set before is set again."""
    wanted = {knob: value for knob, value in {"advisor_mode": "none", **knobs, "run": 1}.items() if (KSM / knob).exists()}
    before = {knob: (KSM / knob).read_text().strip() for knob in wanted}
    if "advisor_mode" in before:
        before["advisor_mode"] = before["advisor_mode"].partition("[")[2].partition("]")[0]
    try:
        set_knobs(**wanted)
        yield
    finally:
        set_knobs(**before)


def settled(read, scans, every, timeout):
    """What `read` says is merged, once the kernel has looked at everything so often and it grows no more, or the time is over.

    A page is merged when it was the same in two passes over all of them; at first there may be none.
    """
    deadline, until, before = time.monotonic() + timeout, counter("full_scans") + scans, -1
    while True:
        time.sleep(every)
        now = read()
        if (counter("full_scans") >= until and now <= before * 1.01) or time.monotonic() >= deadline:
            return now
        before = now
