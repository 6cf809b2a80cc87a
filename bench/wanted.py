"""What the design wants to reach. The scripts that measure and GOALS.md judge by this one table, so that they cannot say different
things of one figure."""

from typing import NamedTuple

from record import verdict


class Bound(NamedTuple):
    """The most that a figure may be, or the least."""

    value: float
    at_least: bool = False

    def verdict(self, figure, spread=None):
        """Whether it is kept, where the spread lets that be told."""
        # What is to be large is small when it is negative.
        sign = -1 if self.at_least else 1
        least, most = sorted(sign * value for value in spread or (figure, figure))
        return verdict((sign * figure, least, most), sign * self.value)


# By the kernel's swap to zram, the same program in turn: the cases of bench/zram, half local but for `quarter`. Populated is twice
# the budget, so half leaves meanwhile.
BY_ZRAM = {
    "uniform": {"mean_us": Bound(0.6), "p99_us": Bound(0.05), "scan_us_per_page": Bound(0.15), "populate_us_per_page": Bound(0.8)},
    "zipf": {"mean_us": Bound(0.6)},
    "threads": {"accesses_per_s": Bound(1.0, at_least=True)},
    "zipf-threads": {"accesses_per_s": Bound(1.3, at_least=True)},
    "quarter": {"mean_us": Bound(1.0), "p99_us": Bound(1.0), "scan_us_per_page": Bound(1.0), "populate_us_per_page": Bound(1.0)},
}
# A fault over TCP by its bare parts; half local over TCP by zram.
TCP_FAULT = Bound(1.1)
TCP_HALF_LOCAL = Bound(1.0)
# An access of a program that fits its budget, or its run time, by the same without us.
FITS = Bound(1.005)
# Pages a CPU second of the memory server by memcached's.
SERVER = Bound(3.0, at_least=True)
# Of the bytes of guests of one image, what need not be kept.
SAVED = Bound(0.86, at_least=True)
# What an application loses by what it loses under zram; the run time of all with half of their memory, geometric mean.
EXCESS = Bound(0.3)
RUN_TIME = Bound(1.06)
PAUSE_MS = Bound(1.0)
