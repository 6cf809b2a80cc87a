"""What this machine lacks for a test."""

import os

import pytest


def give_up(why):
    """Skips the test, or fails it where all are to run."""
    (pytest.fail if os.environ.get("SPILLWAY_TESTS_STRICT") == "1" else pytest.skip)(why)
