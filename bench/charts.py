"""Pictures beside records, drawn where matplotlib is installed."""

import contextlib
import sys

from applications import python_packages


def plotting(seed):
    """matplotlib's pyplot, set up so that the same figures make the same file; none where it is not installed."""
    # Where scripts/setup-tests puts it.
    sys.path.append(str(python_packages().with_name("matplotlib")))
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": seed, "svg.fonttype": "none"}
    from matplotlib import pyplot

    return pyplot


@contextlib.contextmanager
def drawn(pyplot, path, *rows, **options):
    """Axes to draw into, in so many rows and columns, which are written to `path` as SVG."""
    figure, axes = pyplot.subplots(*rows, **options)
    yield axes
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def plain_logarithmic(scale, axis, ticks):
    """Makes an axis logarithmic, with these figures at it, as they are read."""
    scale("log")
    low, high = axis.get_view_interval()
    axis.set_ticks([tick for tick in ticks if low <= tick <= high], [f"{tick:g}" for tick in ticks if low <= tick <= high])
    axis.set_ticks([], minor=True)
