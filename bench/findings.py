"""What bench/papers tells: tables, charts, and each finding of the papers beside ours.

Every sentence about our figures is made from them. A reason why a result differs is given only where a figure bears it out.
"""

import math
import statistics
import textwrap
from typing import NamedTuple

from charts import drawn, plotting
from record import measured_on

# What the papers call clock reads access bits, as this does.
CLOCK = "nru"
BASE = (25, (CLOCK, "on-demand"))


class Finding(NamedTuple):
    """What a paper found and what we did; why they differ, if they do and a figure says so."""

    theirs: str
    ours: str
    agrees: bool
    why: str | None = None

    def line(self):
        ours = f"*The same here:* {self.ours}" if self.agrees else f"**Different here:** {self.ours} {self.why or 'These figures do not say why.'}"
        return textwrap.fill(f"- {self.theirs} {ours}", 120, subsequent_indent="  ")


def case(remote, variant):
    """The name of one case."""
    return f"{remote}%, {name(variant)}"


def name(variant):
    return f"{variant[0]}, {variant[1]}"


def series(one, remote, variant, key):
    """A figure in each round."""
    return [figures[key] for figures in one["runs"][case(remote, variant)]]


def median(one, remote, variant, key):
    return statistics.median(series(one, remote, variant, key))


def paired(ours, theirs):
    """The median of the rounds' ratios: what slows the machine for a while slows both."""
    found = [mine / yours for mine, yours in zip(ours, theirs) if mine and yours]
    return statistics.median(found) if found else None


def slowdown(one, remote, variant):
    """The run time as a ratio to that with all memory local."""
    return paired(series(one, remote, variant, one["time"]), [figures[one["time"]] for figures in one["runs"]["all local"]])


def replayed(one, remote, variant):
    policy, evict = variant
    local = f"{100 - remote}%"
    return next(c for c in one["replay"]["cases"] if (c["local"], c["policy"], c["evict"]) == (local, policy, evict))


def with_blocks(one, block, remote):
    return next(c for c in one["replay"]["blocks"][block] if c["local"] == f"{100 - remote}%")


def mean(ratios):
    """The geometric mean."""
    return math.prod(ratios) ** (1 / len(ratios))


def less(ratio):
    """A ratio as a difference in words."""
    per_cent = round(100 * (1 - ratio))
    return f"{per_cent} % less" if per_cent > 0 else f"{-per_cent} % more" if per_cent < 0 else "as much"


def spread(ratios):
    return f"{less(mean(ratios))} (from {less(min(ratios))} to {less(max(ratios))})"


def table(head, rows):
    return [f"| | {' | '.join(head)} |", "|---" * (len(head) + 1) + "|", *(f"| {first} | {' | '.join(cells)} |" for first, cells in rows), ""]


def grid(measured, remotes, variants, cell):
    rows = [(f"{program}, {remote} % remote", [cell(one, remote, variant) for variant in variants]) for program, one in measured.items() for remote in remotes]
    return table([name(variant) for variant in variants], rows)


def handling(one, remote, variant):
    parts = replayed(one, remote, variant)["handling_us"]
    return f"{parts['total']:.1f} = {parts['link']:.1f} + {parts['eviction']:.1f} + {parts['rest']:.1f}"


def accesses(one, remote, variant):
    ratio = paired(series(one, remote, variant, "fetched_pages"), series(one, *BASE, "fetched_pages"))
    return f"{ratio:.2f}" if ratio else ""


def page(about, measured, remotes, variants, blocks):
    """The page but for its heading and charts."""
    rounds = min(len(figures) for one in measured.values() for figures in one["runs"].values())
    sizes = "; ".join(f"{program}: {one['footprint_bytes'] / (1 << 20):.0f} MiB" for program, one in measured.items())
    block_rows = [
        (f"{program}, {remote} % remote", [f"{with_blocks(one, block, remote)['slowdown']:.2f} ({with_blocks(one, block, remote)['misses']})" for block in blocks])
        for program, one in measured.items()
        for remote in remotes
    ]
    return [
        measured_on(about, by="`bench/papers`"),
        f"Medians of {rounds} rounds or more, the cases in turn; a ratio is the median of the rounds' ratios. Pool",
        "`emulated:?delay=4us&serialize=1`: Lim et al. (HPCA 2012, section 4) emulate their link so; dcm (sections 4 and 5) has RDMA.",
        "Pages move one by one, as theirs do. Their clock reads access bits, as `nru` does here; `clock` is what does without.",
        *textwrap.wrap(f"Footprints: {sizes}. touch does nothing but touch memory: no program with work of its own slows down as much.", 120),
        "",
        "## Findings",
        "",
        *(finding.line() for finding in findings(measured, remotes, variants)),
        "",
        "## Handling a miss (Lim et al., figure 4)",
        "",
        "Microseconds: all = link + eviction that did not overlap + rest. Replays, a page at a time, of an exact trace of each program;",
        f"the rest is measured, an eviction is taken to cost {next(iter(measured.values()))['replay']['capture_us']:g} us by every policy, and every page that leaves crosses the link.",
        "",
        *grid(measured, remotes, variants, handling),
        "Measured in the real runs: the median and the 99th percentile of all faults, from reading one to the wake-up.",
        "",
        *grid(measured, remotes, variants, lambda *at: f"{median(*at, 'fault_p50_us'):.1f}, {median(*at, 'fault_p99_us'):.0f}"),
        "## Remote accesses (Lim et al., figure 5a)",
        "",
        f"Pages fetched in the real runs, as a ratio to {name(BASE[1])} at {BASE[0]} % remote.",
        "",
        *grid(measured, remotes, variants, accesses),
        "## Run time (Lim et al., figure 5b; dcm, figure 10)",
        "",
        "Of each program's measured part, as a ratio to that with all memory local and no pager.",
        "",
        *grid(measured, remotes, variants, lambda *at: f"{slowdown(*at):.1f}"),
        "## Block size (dcm, figures 9 to 11)",
        "",
        "Run time of the whole program as a ratio to that with all memory local, and misses, by how many adjacent pages",
        "always move together: replays under clock, with pre-evict.",
        "",
        *table(blocks, block_rows),
    ]


def ratios(measured, remotes, of, to, figure):
    """A figure under one variant as ratios to that under another, for all programs and shares where there are any."""
    found = [paired(figure(one, remote, of), figure(one, remote, to)) for one in measured.values() for remote in remotes]
    return [ratio for ratio in found if ratio]


def by_use(measured):
    """The programs that use all of their memory alike, and the others."""
    is_even = lambda program: "uniform" in program or "in order" in program
    return [{program: one for program, one in measured.items() if is_even(program) is even} for even in (True, False)]


def findings(measured, remotes, variants):
    """All of them, as far as the programs that they need were measured."""
    by_policy = lambda evict: (("rr", evict), (CLOCK, evict))
    by_scheme = lambda policy: ((policy, "pre-evict"), (policy, "on-demand"))
    fetched = lambda one, remote, variant: series(one, remote, variant, "fetched_pages")
    served = lambda one, remote, variant: series(one, remote, variant, "fault_p50_us")
    took = lambda one, remote, variant: series(one, remote, variant, one["time"])
    total = lambda one, remote, variant: [replayed(one, remote, variant)["handling_us"]["total"]]

    def both(pair, figure):
        """Of both schemes, or both policies."""
        others = ("on-demand", "pre-evict") if pair is by_policy else ("rr", CLOCK)
        return [ratio for other in others for ratio in ratios(measured, remotes, *pair(other), figure)]

    rr_served, schemes_total = both(by_policy, served), both(by_scheme, total)
    waits = [replayed(one, remote, variant)["handling_us"] for one in measured.values() for remote in remotes for variant in variants if variant[1] == "pre-evict"]
    link_us = statistics.median(parts["link"] for parts in waits)
    scheme_fetched, policy_fetched = both(by_scheme, fetched), both(by_policy, fetched)
    # Of programs that use all of their memory alike, and of the others.
    alike, apart = ([ratio for evict in ("on-demand", "pre-evict") for ratio in ratios(some, remotes, *by_policy(evict), fetched)] for some in by_use(measured))
    scheme_time, policy_time = both(by_scheme, took), both(by_policy, took)
    if not all((rr_served, schemes_total, scheme_fetched, policy_fetched, scheme_time, policy_time)):
        return by_program(measured, remotes)
    found = [
        Finding(
            "Lim: round-robin handles a remote access in 26 to 35 % less time than clock.",
            f"the median fault takes {spread(rr_served)} time.",
            mean(rr_served) <= 0.9,
            "Their clock reads access bits while a fault waits. Here pages are chosen 64 at a time, mostly before a fault needs the room, and "
            "their bits read in one go."
            if 0.9 < mean(rr_served) < 1.1
            else None,
        ),
        Finding(
            "Lim: pre-evict handles it in 17 to 28 % less time than on-demand.",
            f"in the replay a miss takes {spread(schemes_total)} time.",
            mean(schemes_total) <= 0.9,
            f"A page takes 4 us on the link, and a miss waits {link_us:.1f} us for it (median): the page that leaves crosses the same link, and what "
            "overlaps with a fetch elsewhere waits for its turn there."
            if link_us > 6
            else None,
        ),
        Finding(
            "Lim: on-demand and pre-evict need nearly the same number of remote accesses.",
            f"pre-evict fetches {spread(scheme_fetched)}.",
            0.95 <= mean(scheme_fetched) <= 1.05,
        ),
        Finding(
            "Lim: clock needs 16 to 33 % fewer remote accesses than round-robin with 25 and 50 % remote, and as many with 75 %.",
            f"compared with clock, round-robin fetches {spread(policy_fetched)}.",
            mean(policy_fetched) >= 1.1,
            "Two of these programs use all of their memory alike, so no page is worth more than another: there it is "
            f"{spread(alike)}, in the third {spread(apart)}."
            if alike and apart and abs(1 - mean(alike)) < abs(1 - mean(apart))
            else None,
        ),
        Finding(
            "Lim: pre-evict makes programs faster by 23 % on average, more than a change of policy does.",
            f"with pre-evict they take {spread(scheme_time)} time, with round-robin instead of clock {spread(policy_time)}.",
            mean(scheme_time) <= 0.9 and abs(1 - mean(scheme_time)) > abs(1 - mean(policy_time)),
        ),
    ]
    return found + by_program(measured, remotes)


def by_program(measured, remotes):
    """Findings about programs whose working sets are near their footprints, or far below; or that go through their memory in order."""
    default = ("clock", "pre-evict")
    found = []
    near, scan, far = (next((one for program, one in measured.items() if word in program), None) for word in ("uniform", "in order", "python"))
    if near and far:
        pairs = [(slowdown(near, remote, default), slowdown(far, remote, default)) for remote in remotes]
        found.append(
            Finding(
                "Lim, dcm: programs whose working set is far below their footprint suffer much less from remote memory than those whose working "
                "set is near it.",
                "run times are "
                + ", ".join(f"{n:.1f} and {f:.1f} times those of all local with {remote} % remote" for remote, (n, f) in zip(remotes, pairs))
                + ".",
                all(n > 2 * f for n, f in pairs),
            )
        )
    if scan:
        small, large = (with_blocks(scan, block, 75)["slowdown"] for block in ("4K", "64K"))
        found.append(
            Finding(
                "dcm: going through memory in order with a quarter of it local, blocks of 64 KiB take 24 % less time than pages.",
                f"compared with pages they take {less(large / small)} time in the replay.",
                large / small <= 0.9,
                "A block of 16 pages crosses this link in the time of 16 pages: only the rest of a fault is saved. A message of RDMA "
                "costs dcm far more than the bytes of a page."
                if 0.9 < large / small < 1
                else None,
            )
        )
    if near and with_blocks(near, "4K", 75)["fetched_pages"]:
        small, large = (with_blocks(near, block, 75) for block in ("4K", "64K"))
        pages = large["fetched_pages"] / small["fetched_pages"]
        found.append(
            Finding(
                "dcm: with a quarter local, blocks of 32 and 64 KiB harm programs that touch pages here and there.",
                f"compared with pages they take {less(large['slowdown'] / small['slowdown'])} time in the replay, and fetch {less(pages)}.",
                large["slowdown"] / small["slowdown"] > 1.02,
            )
        )
    return found


def charts(measured, remotes, variants, into, record):
    """Draws handling times and run times as bars beside the page, if matplotlib is there; lines that show them."""
    pyplot = plotting(record)
    if not pyplot:
        return []
    parts = (("link", "#4878a8"), ("eviction", "#e0883c"), ("rest", "#9a9a9a"))
    lines = ["## Charts", ""]
    for kind, label in (("handling", "us a miss (replay)"), ("time", "run time, all local = 1")):
        path = into / f"{record}-{kind}.svg"
        with drawn(pyplot, path, len(measured), 1, figsize=(9, 2.6 * len(measured)), squeeze=False) as axes:
            for axis, (program, one) in zip(axes[:, 0], measured.items()):
                cases = [(remote, variant) for remote in remotes for variant in variants]
                places = [at + at // len(variants) for at in range(len(cases))]
                if kind == "handling":
                    low = [0.0] * len(cases)
                    for part, colour in parts:
                        heights = [replayed(one, *at)["handling_us"][part] for at in cases]
                        axis.bar(places, heights, bottom=low, color=colour, label=part)
                        low = [a + b for a, b in zip(low, heights)]
                else:
                    axis.bar(places, [slowdown(one, *at) for at in cases], color=parts[0][1])
                    axis.axhline(1, color="black", linewidth=0.8)
                axis.set_title(program, fontsize=9)
                axis.set_ylabel(label, fontsize=8)
                axis.set_xticks(places, [f"{v[0]} {'PE' if v[1] == 'pre-evict' else 'OD'} {r}%" for r, v in cases], rotation=60, fontsize=7, ha="right")
            if kind == "handling":
                axes[0, 0].legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
        lines += [f"![{label}, by policy, scheme and remote share]({path.name})", ""]
    return lines
