//! What a replay came to: a table, or JSON.

use serde::Serialize;
use spillway_core::PAGE_BYTES_U64;
use spillway_core::size::Bytes;
use spillway_study::optimal::Optimum;
use spillway_study::references::References;
use spillway_study::replay::{Costs, Handling, Replayed, Setting};
use spillway_study::source::{About, Kind};
use std::fmt::Write;
use std::path::Path;

/// All of it.
#[derive(Serialize)]
pub(crate) struct Report {
    file: String,
    /// What the trace can tell and what not.
    faithful: String,
    /// References, those of the page that was touched last among them.
    references: u64,
    /// Distinct pages.
    pages: u32,
    /// The most memory that the program had at one time.
    peak_bytes: u64,
    /// For how long it ran by itself.
    ran_s: f64,
    link_us: f64,
    fault_us: f64,
    capture_us: f64,
    /// One for each share of local memory, policy and scheme.
    pub(super) cases: Vec<Case>,
}

/// One replay.
#[derive(Serialize)]
pub(crate) struct Case {
    /// As it was asked for.
    pub(super) local: String,
    pub(super) local_bytes: u64,
    pub(super) policy: &'static str,
    /// None for the optimum, which takes no time.
    pub(super) evict: Option<&'static str>,
    /// None for the optimum, which moves one page at a time.
    pub(super) block: Option<&'static str>,
    /// Faults on pages that nobody had touched.
    first_touches: u64,
    /// Faults on pages that had left.
    misses: u64,
    /// Of these, served from the pager's buffers.
    refaults: u64,
    /// Misses by references.
    pub(super) miss_ratio: f64,
    fetched_pages: u64,
    /// Of those, pages that no fault had asked for.
    prefetched_pages: u64,
    /// The share of such pages that the program touched before they left; none if there were none.
    prefetch_accuracy: Option<f64>,
    /// The same, as the pager estimates it from what raises faults.
    prefetch_accuracy_seen: Option<f64>,
    /// At the end, pages in blocks of 1, 2, 4, 8 and 16.
    block_pages: [u64; 5],
    evicted_pages: u64,
    written_pages: u64,
    /// The mean time of a miss.
    handling_us: Breakdown,
    /// The run time by that with all memory local; at least that, for the optimum.
    slowdown: f64,
}

/// Where the time of a miss goes, as in Lim et al., figure 4.
#[derive(Serialize)]
struct Breakdown {
    link: f64,
    eviction: f64,
    rest: f64,
    total: f64,
}

impl Breakdown {
    fn mean(of: Handling) -> Self {
        let mean = |ns: u64| us(ns) / of.faults.max(1) as f64;
        let (link, eviction, rest) = (mean(of.link_ns), mean(of.eviction_ns), mean(of.rest_ns));
        Self { link, eviction, rest, total: link + eviction + rest }
    }
}

fn us(ns: u64) -> f64 {
    ns as f64 / 1e3
}

fn ratio(misses: u64, references: &References) -> f64 {
    misses as f64 / references.touches().max(1) as f64
}

fn share(used: u64, of: u64) -> Option<f64> {
    (of > 0).then(|| used as f64 / of as f64)
}

fn slowdown(handled_ns: u64, references: &References) -> f64 {
    1.0 + handled_ns as f64 / references.ran_ns().max(1) as f64
}

impl Case {
    /// What a policy did.
    pub(super) fn replayed(local: &str, setting: Setting, done: Replayed, references: &References) -> Self {
        Self {
            local: local.into(),
            local_bytes: setting.local_pages * PAGE_BYTES_U64,
            policy: setting.policy.name(),
            evict: Some(setting.scheme.name()),
            block: Some(setting.block.name()),
            first_touches: done.first.faults,
            misses: done.missed.faults,
            refaults: done.refaults,
            miss_ratio: ratio(done.missed.faults, references),
            fetched_pages: done.fetched_pages,
            prefetched_pages: done.prefetched_pages,
            prefetch_accuracy: share(done.prefetched_used_pages, done.prefetched_pages),
            prefetch_accuracy_seen: share(done.sampled_used_pages, done.sampled_pages),
            block_pages: done.block_pages,
            evicted_pages: done.evicted_pages,
            written_pages: done.written_pages,
            handling_us: Breakdown::mean(done.missed),
            slowdown: slowdown(done.first.total_ns() + done.missed.total_ns(), references),
        }
    }

    /// The bound.
    pub(super) fn optimum(local: &str, pages: u64, best: Optimum, references: &References, costs: Costs) -> Self {
        let missed = Handling {
            faults: best.misses,
            link_ns: best.misses * costs.link_ns,
            eviction_ns: 0,
            rest_ns: best.misses * costs.fault_ns,
        };
        Self {
            local: local.into(),
            local_bytes: pages * PAGE_BYTES_U64,
            policy: super::OPTIMUM,
            evict: None,
            block: None,
            first_touches: best.first_touches,
            misses: best.misses,
            refaults: 0,
            miss_ratio: ratio(best.misses, references),
            fetched_pages: best.misses,
            prefetched_pages: 0,
            prefetch_accuracy: None,
            prefetch_accuracy_seen: None,
            block_pages: [0; 5],
            evicted_pages: best.misses,
            written_pages: 0,
            handling_us: Breakdown::mean(missed),
            slowdown: slowdown(missed.total_ns(), references),
        }
    }

    fn line(&self) -> String {
        let Breakdown { link, eviction, rest, total } = &self.handling_us;
        let least = if self.evict.is_none() { ">=" } else { "" };
        format!(
            "{:<8} {:>10} {:<8} {:<10} {:<7} {:>10} {:>9} {:>9.4}% {:>6.1} {:>8.1} {:>6.1} {:>6.1} {:>9} {:>9}\n",
            self.local,
            Bytes(self.local_bytes),
            self.policy,
            self.evict.unwrap_or("-"),
            self.block.unwrap_or("-"),
            self.misses,
            self.refaults,
            100.0 * self.miss_ratio,
            link,
            eviction,
            rest,
            total,
            format!("{least}{:.2}x", self.slowdown),
            self.prefetch_accuracy.map_or("-".into(), |share| format!("{share:.2}")),
        )
    }
}

impl Report {
    /// Of no case yet.
    pub(super) fn new(path: &Path, of: &References, about: About, costs: Costs) -> Self {
        Self {
            file: crate::say::clean(&path.to_string_lossy()),
            faithful: faithful(&about),
            references: of.touches(),
            pages: of.pages(),
            peak_bytes: of.peak_pages() * PAGE_BYTES_U64,
            ran_s: of.ran_ns() as f64 / 1e9,
            link_us: us(costs.link_ns),
            fault_us: us(costs.fault_ns),
            capture_us: us(costs.capture_ns),
            cases: Vec::new(),
        }
    }

    /// For people.
    pub(super) fn table(&self) -> String {
        let mut text = format!(
            "{}: {} references, {} pages, {} at most; {:.3} s without faults\n{}\n",
            self.file,
            self.references,
            self.pages,
            Bytes(self.peak_bytes),
            self.ran_s,
            self.faithful,
        );
        let _ = writeln!(
            text,
            "a page on the link {} us, a fault {} us, a capture {} us\n",
            self.link_us, self.fault_us, self.capture_us,
        );
        let _ = writeln!(
            text,
            "{:<19} {:<8} {:<10} {:<7} {:>10} {:>9} {:>10} {:>6} {:>8} {:>6} {:>6} {:>9} {:>9}",
            "local",
            "policy",
            "evict",
            "block",
            "misses",
            "refaults",
            "of refs",
            "link",
            "eviction",
            "rest",
            "us",
            "run time",
            "accuracy",
        );
        self.cases.iter().for_each(|case| text += &case.line());
        let has = |wanted: fn(&Case) -> bool| self.cases.iter().any(wanted);
        if has(|case| case.evict.is_none()) && has(|case| case.block.is_some_and(|block| block != "4k")) {
            text += "\nopt moves one page a miss; a policy that moves blocks may miss less often, and never moves fewer pages\n";
        }
        text
    }
}

/// What a trace can tell and what not.
pub(crate) fn faithful(about: &About) -> String {
    let mut text = match about.kind {
        Kind::Faults { budget_pages } => {
            let budget = match budget_pages {
                u64::MAX => "the budget that it was recorded with".into(),
                pages => Bytes(pages * PAGE_BYTES_U64).to_string(),
            };
            format!(
                "faithful: only in part. The trace has faults, and no touch of a page that was local under {budget}: what the \
                 program uses all the time is not missed here and takes up no room, so with any budget, also with that one, it \
                 misses more than is said; `--exact` records that"
            )
        }
        Kind::Windows { window_ns } => format!(
            "faithful: to within windows of {} ms. Of each page the trace has the first touch in each; what is missed and \
             touched again within one is not in it",
            window_ns / 1_000_000
        ),
        Kind::Addresses => "faithful: every reference is in it, without times: run times are by --reference".into(),
    };
    if about.kind != Kind::Addresses {
        text += "; its times include some of what recording cost, so the program ran faster by itself (--ran)";
    }
    if about.dropped > 0 {
        let _ = write!(text, "; {} records are missing", about.dropped);
    }
    if about.truncated {
        text += "; the file ends before the recording did, and what is there was used";
    }
    text
}
