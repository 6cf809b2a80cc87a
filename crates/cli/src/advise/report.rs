//! What is said of a curve: a sentence, how sure it is, or JSON.

use serde::Serialize;
use spillway_core::PAGE_BYTES_U64;
use spillway_core::size::Bytes;
use spillway_study::advice::{Advice, Observed, Point, advise};
use spillway_study::curve::Curve;
use spillway_study::workingset::WorkingSet;

/// How much was looked at.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Seen {
    /// Pages in the sample at the end.
    pub(super) pages: u64,
    /// Touches of sampled pages.
    pub(super) touches: u64,
    /// Whether all pages were in the sample.
    pub(super) all: bool,
}

/// A size and what it costs.
#[derive(Clone, Copy, Serialize)]
struct Size {
    local_bytes: u64,
    /// References that miss, by all that were seen.
    miss_ratio: f64,
    misses: f64,
    /// The run time grows by this share of itself.
    loss: f64,
}

impl From<Point> for Size {
    fn from(Point { pages, miss_ratio, misses, loss }: Point) -> Self {
        Self { local_bytes: pages * PAGE_BYTES_U64, miss_ratio, misses, loss }
    }
}

/// All of it.
#[derive(Serialize)]
pub(super) struct Report {
    /// In words.
    advice: String,
    /// What can be relied on.
    sure: String,
    faithful: String,
    /// The program's memory.
    all_bytes: u64,
    /// The least with which it loses hardly anything.
    enough: Size,
    /// What each half of the sample says to that, in bytes.
    enough_by_halves: [u64; 2],
    /// The most with which it takes more than twice its time; none if it never does.
    thrashing: Option<Size>,
    /// Below, the curve counts too few misses.
    known_from_bytes: u64,
    miss_us: f64,
    ran_s: f64,
    sample: Seen,
    curve: Vec<Size>,
}

impl Report {
    /// Of a curve and those of the halves of its sample.
    pub(super) fn new(
        (whole, halves): (Curve, [Curve; 2]),
        within: Option<&WorkingSet>,
        observed: Observed,
        sample: Seen,
        faithful: String,
    ) -> Self {
        let found = advise(&whole, within, observed);
        let by_halves = halves.map(|half| advise(&half, within, observed).enough.pages * PAGE_BYTES_U64);
        Self {
            advice: sentence(&found, observed),
            sure: sure(&found, by_halves, sample, observed),
            faithful,
            all_bytes: observed.pages * PAGE_BYTES_U64,
            enough: found.enough.into(),
            enough_by_halves: by_halves,
            thrashing: found.thrashing.map(Size::from),
            known_from_bytes: found.known_from_pages * PAGE_BYTES_U64,
            miss_us: observed.miss_ns as f64 / 1e3,
            ran_s: observed.ran_ns as f64 / 1e9,
            sample,
            curve: found.points.into_iter().map(Size::from).collect(),
        }
    }

    /// For people.
    pub(super) fn text(&self) -> String {
        format!("{}\n{}\n{}\n", self.advice, self.sure, self.faithful)
    }
}

fn bytes(pages: u64) -> Bytes {
    Bytes(pages * PAGE_BYTES_U64)
}

/// Percent as people say them.
fn percent(share: f64) -> String {
    match 100.0 * share {
        small if small < 0.5 => "less than 1 %".into(),
        percent => format!("about {percent:.0} %"),
    }
}

fn sentence(found: &Advice, observed: Observed) -> String {
    let Advice { enough, thrashing, points, known_from_pages } = found;
    let all = bytes(observed.pages);
    let mut text = if enough.pages >= observed.pages {
        format!("it needs all of its {all}: with anything less it loses time")
    } else {
        format!("with {} local (of {all}) you lose {}", bytes(enough.pages), percent(enough.loss))
    };
    match (thrashing, points.first()) {
        (Some(point), _) => {
            text += &format!("; below {} it thrashes: it takes more than twice its time", bytes(point.pages));
        }
        (None, Some(least)) if least.pages < enough.pages && least.pages >= *known_from_pages => {
            text += &format!("; it never thrashes: with {} you lose {}", bytes(least.pages), percent(least.loss));
        }
        (None, _) => {}
    }
    text
}

fn sure(found: &Advice, by_halves: [u64; 2], sample: Seen, observed: Observed) -> String {
    let mut text = if sample.all {
        format!("sure: all pages were looked at, {} touches", sample.touches)
    } else {
        let [one, other] = by_halves.map(Bytes);
        format!(
            "sure: from {} sampled pages and {} touches of them; by each half of the sample the first figure would be {one} and \
             {other}",
            sample.pages, sample.touches
        )
    };
    text += &format!(", at {:.1} us a miss", observed.miss_ns as f64 / 1e3);
    if found.known_from_pages > 0 {
        text += &format!("; below {} more is lost than is said here", bytes(found.known_from_pages));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(enough: (u64, f64), thrashing: Option<u64>) -> Advice {
        let point = |pages, loss| Point { pages, miss_ratio: loss / 10.0, misses: loss, loss };
        let enough = point(enough.0, enough.1);
        let points = vec![point(10 << 8, 0.4), enough];
        Advice { points, enough, thrashing: thrashing.map(|pages| point(pages, 1.5)), known_from_pages: 0 }
    }

    #[test]
    fn advice_is_a_sentence() {
        let observed = Observed { pages: 1000 << 8, ran_ns: 1, miss_ns: 9_000, known_from_pages: 0 };
        for (advice, text) in [
            (
                found((600 << 8, 0.028), Some(300 << 8)),
                "with 600.0 MiB local (of 1000.0 MiB) you lose about 3 %; below 300.0 MiB it thrashes: it takes more than twice \
                 its time",
            ),
            (
                found((1000 << 8, 0.0), None),
                "it needs all of its 1000.0 MiB: with anything less it loses time; it never thrashes: with 10.0 MiB you lose \
                 about 40 %",
            ),
            (found((10 << 8, 0.001), None), "with 10.0 MiB local (of 1000.0 MiB) you lose less than 1 %"),
        ] {
            assert_eq!(sentence(&advice, observed), text);
        }
    }

    #[test]
    fn what_is_not_known_is_said() {
        let observed = Observed { pages: 1000, ran_ns: 1, miss_ns: 9_000, known_from_pages: 256 };
        let advice = Advice { known_from_pages: 256, ..found((600, 0.02), None) };
        let text = sure(&advice, [1 << 20, 2 << 20], Seen { pages: 7, touches: 9, all: false }, observed);
        assert!(text.contains("7 sampled pages and 9 touches") && text.contains("1.0 MiB and 2.0 MiB"), "{text}");
        assert!(text.contains("9.0 us a miss; below 1.0 MiB more is lost"), "{text}");
    }
}
