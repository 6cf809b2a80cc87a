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
    /// Moved here since mappings were last at rest: likewise, and all the same it is there.
    arrived: Vec<Span>,
}

impl Announced {
    /// A removal, to be settled; its number, and what is settled with it: where there are too many, also what the last one was of,
    /// whose number then means nothing any more.
    pub fn removal(&mut self, span: Span) -> (u64, Span) {
        self.next += 1;
        let full = self.removals.len() >= SPANS_MAX;
        let last = if full { self.removals.pop() } else { None };
        let span = last.map_or(span, |(_, last)| cover(last, span));
        self.removals.push((self.next, span));
        (self.next, span)
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

    /// A scan of resident pages begins, or one that has begun takes in more. It may see what was removed before and is not settled.
    pub fn scan_begins(&mut self) {
        let unsettled = || self.removals.iter().map(|(_, span)| *span).collect();
        self.since_scan.get_or_insert_with(unsettled);
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

    /// `span` was moved to where it is.
    pub fn arrived(&mut self, span: Span) {
        self.arrived.retain(|other| other.intersect(span) != Some(*other));
        self.arrived.push(span);
    }

    /// The parts of `span` that were moved there: an unmapping of them may be older than that.
    pub fn arrived_in(&self, span: Span) -> Vec<Span> {
        self.arrived.iter().filter_map(|arrived| arrived.intersect(span)).collect()
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
        let (older, _) = announced.removal(span(0, 10));
        let (younger, _) = announced.removal(span(4, 6));
        assert_eq!(announced.unchanged_since(older, span(0, 10)), [span(0, 4), span(6, 10)]);
        announced.settled(older, span(0, 10));
        assert_eq!(announced.unchanged_since(older, span(0, 10)), [span(0, 4), span(6, 10)]);
        announced.settled(younger, span(4, 6));
        assert_eq!(announced.unchanged_since(older, span(0, 10)), [span(0, 10)]);
    }

    /// Of which each is settled by what was told of it: the oldest ones stayed unsettled for ever, as part of one that nobody had
    /// been told of.
    #[test]
    fn more_removals_than_are_remembered_are_settled_all_the_same() {
        let mut announced = Announced::default();
        let many = 3 * SPANS_MAX as u64;
        let of = |i| span(7 + i, 8 + i);
        let told: Vec<(u64, Span)> = (0..many).map(|i| announced.removal(of(i))).collect();
        assert!((0..many).all(|i| announced.unchanged_since(0, of(i)).is_empty()));
        // Of the one that covers many, the last word counts.
        for &(number, what) in &told {
            announced.settled(number, what);
            let over = announced.unchanged_since(number, what);
            let is_over = over == [what] || number < many && what.end > of(SPANS_MAX as u64 - 2).end;
            assert!(is_over, "{number}: {what:?}, {over:?}");
        }
        assert_eq!(announced.unchanged_since(0, span(0, 1 << 20)), [span(0, 1 << 20)]);
    }

    /// What a thread has yet to remove, another scan sees as the one before it did.
    #[test]
    fn a_scan_knows_of_removals_from_before_it_began() {
        let mut announced = Announced::default();
        announced.scan_begins();
        announced.during_scan(span(0, 2));
        announced.scan_begins();
        assert_eq!(announced.removed_during_scan(span(1, 9)), [span(1, 2)]);
        announced.scan_ends();
        announced.removal(span(4, 6));
        announced.scan_begins();
        assert_eq!(announced.removed_during_scan(span(0, 9)), [span(4, 6)]);
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
