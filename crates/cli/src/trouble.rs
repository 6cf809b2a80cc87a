//! What users must know at once: the pool takes no more, or has lost pages. Said when it begins and when it ends.

use crate::say;
use spillway_core::PAGE_BYTES_U64;
use spillway_core::size::Bytes;
use spillway_pager::Snapshot;

/// What was said so far.
#[derive(Default)]
pub(crate) struct Trouble {
    full: bool,
    lost_pages: u64,
    share_refused: Option<String>,
    unheritable: bool,
}

impl Trouble {
    /// Says what has changed.
    pub(crate) fn tell(&mut self, now: &Snapshot) {
        self.lines(now).iter().for_each(say::note);
    }

    fn lines(&mut self, now: &Snapshot) -> Vec<String> {
        let mut lines = Vec::new();
        match (std::mem::replace(&mut self.full, now.pool_full), now.pool_full) {
            (false, true) => lines.push(format!(
                "the pool takes no pages now: {} stay local, where {} may; nothing is lost (`spillway pool status` asks why)",
                Bytes(now.local_bytes),
                Bytes(now.budget_bytes),
            )),
            (true, false) => lines.push("the pool takes pages again".into()),
            _ => {}
        }
        if now.share_refused != self.share_refused {
            self.share_refused.clone_from(&now.share_refused);
            lines.extend(
                now.share_refused.iter().map(|why| format!("the kernel would not change what it merges: {why}")),
            );
        }
        match (std::mem::replace(&mut self.unheritable, now.unheritable), now.unheritable) {
            (false, true) => lines.push(
                "there are too many processes or mappings for another pager to take over: should this one be killed now, they wait for \
                 ever; `upgrade` and SIGHUP are refused until there are fewer"
                    .into(),
            ),
            (true, false) => lines.push("another pager could take over again".into()),
            _ => {}
        }
        let lost = now.lost_pages.saturating_sub(std::mem::replace(&mut self.lost_pages, now.lost_pages));
        if lost > 0 {
            let size = Bytes(lost * PAGE_BYTES_U64);
            lines.push(format!("the pool lost {lost} pages ({size}): whoever touches one of them gets SIGBUS"));
        }
        lines
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_thing_is_said_once() {
        let mut trouble = Trouble::default();
        let well = Snapshot::default();
        let full = Snapshot { pool_full: true, lost_pages: 2, ..Snapshot::default() };
        assert!(trouble.lines(&well).is_empty());
        let said = trouble.lines(&full);
        assert!(
            said[0].starts_with("the pool takes no pages now")
                && said[1].starts_with("the pool lost 2 pages (8.0 KiB)")
        );
        assert!(trouble.lines(&full).is_empty());
        let said = trouble.lines(&Snapshot { lost_pages: 3, ..Snapshot::default() });
        assert_eq!(said[0], "the pool takes pages again");
        assert!(said[1].starts_with("the pool lost 1 pages"));
        let many = Snapshot { unheritable: true, lost_pages: 3, ..Snapshot::default() };
        assert!(trouble.lines(&many)[0].starts_with("there are too many processes or mappings"));
        assert!(trouble.lines(&many).is_empty());
    }
}
