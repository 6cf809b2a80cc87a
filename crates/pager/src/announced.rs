//! What a target has announced of late, against which news about its pages is held: a scan tells how things were when
//! it was made, and is heard of later.

use spillway_core::Span;

/// Spans remembered of either kind; more are merged, which makes news count for less and never for more.
const SPANS_MAX: usize = 1024;

/// The announcements of one target.
#[derive(Default)]
pub struct Announced {
    /// Removals that are not settled, in the order of their numbers.
    removals: Vec<(u64, Span)>,
    next: u64,
    /// Everything removed since the scan under way began; none while no scan is.
    since_scan: Option<Vec<Span>>,
    /// Registered at a time when mappings were changing: an unmapping that is yet to be heard of may be older.
    fresh: Vec<Span>,
    /// Moved here at such a time: likewise, and all the same it is there.
    arrived: Vec<Span>,
}

impl Announced {
    /// A removal, to be settled; its number.
    pub fn removal(&mut self, span: Span) -> u64 {
        if self.removals.len() >= SPANS_MAX {
            let (_, oldest) = self.removals.remove(0);
            self.removals[0].1 = cover(self.removals[0].1, oldest);
        }
        self.next += 1;
        self.removals.push((self.next, span));
        self.next
    }

    /// Removal `number`, and the older ones of pages of `span` only, need no settling any more.
    pub fn settled(&mut self, number: u64, span: Span) {
        self.removals.retain(|&(other, at)| other > number || at.intersect(span) != Some(at));
    }

    /// Of `span`, what no removal younger than `number` concerns: what was seen of the rest may be out of date.
    pub fn unchanged_since(&self, number: u64, span: Span) -> Vec<Span> {
        let younger = self.removals.iter().filter(|(other, _)| *other > number).map(|(_, span)| *span);
        span.without(younger)
    }

    /// A scan of resident pages begins.
    pub fn scan_begins(&mut self) {
        self.since_scan = Some(Vec::new());
    }

    /// All that the scan saw has been heard.
    pub fn scan_ends(&mut self) {
        self.since_scan = None;
    }

    /// Pages are removed, of which a scan may see some still.
    pub fn during_scan(&mut self, span: Span) {
        let Some(spans) = &mut self.since_scan else { return };
        let full = spans.len() >= SPANS_MAX;
        match spans.last_mut().filter(|_| full) {
            Some(last) => *last = cover(*last, span),
            None => spans.push(span),
        }
    }

    /// Of `span`, what was removed since the scan began.
    pub fn removed_during_scan(&self, span: Span) -> Vec<Span> {
        let spans = self.since_scan.iter().flatten();
        spans.filter_map(|removed| removed.intersect(span)).collect()
    }

    /// `spans` were registered while mappings were changing.
    pub fn registered(&mut self, spans: impl Iterator<Item = Span>) {
        self.fresh.extend(spans);
    }

    /// Whether an unmapping of `span` may be older than what is registered there now.
    pub fn is_fresh(&self, span: Span) -> bool {
        self.fresh.iter().any(|fresh| fresh.intersect(span).is_some())
    }

    /// `span` was moved to where it is while mappings were changing.
    pub fn arrived(&mut self, span: Span) {
        self.arrived.push(span);
    }

    /// Whether an unmapping of `span` may be older than the move that brought it there.
    pub fn has_arrived(&self, span: Span) -> bool {
        self.arrived.iter().any(|arrived| arrived.intersect(span) == Some(span))
    }

    /// Whether mappings were last seen changing.
    pub fn is_unsettled(&self) -> bool {
        !(self.fresh.is_empty() && self.arrived.is_empty())
    }

    /// No mapping is changing: every unmapping that was made has been heard of.
    pub fn at_rest(&mut self) {
        self.fresh.clear();
        self.arrived.clear();
    }
}

fn cover(a: Span, b: Span) -> Span {
    Span { start: a.start.min(b.start), end: a.end.max(b.end) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use spillway_core::Address;

    fn span(start: u64, end: u64) -> Span {
        Span { start: Address(start * 4096), end: Address(end * 4096) }
    }

    /// A removal that was announced after a scan makes what the scan saw worthless, for its own pages.
    #[test]
    fn a_late_word_of_one_removal_does_not_settle_a_younger_one() {
        let mut announced = Announced::default();
        let older = announced.removal(span(0, 10));
        let younger = announced.removal(span(4, 6));
        assert_eq!(announced.unchanged_since(older, span(0, 10)), [span(0, 4), span(6, 10)]);
        announced.settled(older, span(0, 10));
        assert_eq!(announced.unchanged_since(older, span(0, 10)), [span(0, 4), span(6, 10)]);
        announced.settled(younger, span(4, 6));
        assert_eq!(announced.unchanged_since(older, span(0, 10)), [span(0, 10)]);
    }

    #[test]
    fn merged_removals_still_cover_what_they_covered() {
        let mut announced = Announced::default();
        let first = announced.removal(span(7, 8));
        let many = 3 * SPANS_MAX as u64;
        for i in 0..many {
            announced.removal(span(100 + i, 101 + i));
        }
        assert!(announced.unchanged_since(first - 1, span(7, 8)).is_empty());
        assert!((0..many).all(|i| announced.unchanged_since(first, span(100 + i, 101 + i)).is_empty()));
        announced.settled(u64::MAX, span(0, 1 << 30));
        assert_eq!(announced.unchanged_since(0, span(0, 1 << 20)), [span(0, 1 << 20)]);
    }

    #[test]
    fn a_scan_knows_what_was_removed_since_it_began() {
        let mut announced = Announced::default();
        announced.during_scan(span(0, 5));
        announced.scan_begins();
        assert!(announced.removed_during_scan(span(0, 9)).is_empty());
        announced.during_scan(span(3, 5));
        assert_eq!(announced.removed_during_scan(span(4, 9)), [span(4, 5)]);
        announced.scan_ends();
        assert!(announced.removed_during_scan(span(0, 9)).is_empty());
    }
}
