//! Memory that several targets have mapped, of a pager that was killed.
//!
//! Its file is there as long as anyone has it mapped, and what the mappings show is asked of the kernel. Home is elsewhere in each pager.
//! What was being taken out is in the file or in a buffer: it is put back where it is not there, and so was never taken out. But a
//! call that somebody holds up is made even when its process was killed: until that has ended, nobody may have these pages.

use std::fs::File;
use std::sync::Arc;
use std::time::Duration;

use spillway_core::evict::{Bytes, Captured};
use spillway_core::page::BufferIndex;
use spillway_core::pager::Stop;
use spillway_core::{Address, PageIndex, Span, TargetId};

use super::super::{Driver, Report};
use crate::commons::Commons;
use crate::error::Error;
use crate::estate::{Estate, FoundCommons};
use crate::outlook::Outlook;
use crate::procfs;
use crate::tally::Tally;
use crate::target::Target;
use crate::watcher::{InheritedCommons, Request};

/// How often it is looked whether a process has ended at last.
const LOOK_EVERY: Duration = Duration::from_millis(1);

/// A file that was found.
pub struct CommonsHeir {
    /// What was written down of it.
    pub found: FoundCommons,
    /// The file.
    pub file: Arc<File>,
    /// What is told of its tree.
    pub tally: Arc<Tally>,
}

/// Pages that were being taken out of a file.
pub(super) struct Leaving {
    commons: TargetId,
    /// By whom, and when that process was started.
    taker: (i32, u64),
    pages: Vec<LeavingPage>,
}

#[derive(Clone, Copy)]
struct LeavingPage {
    /// The number by which it is written down.
    noted: usize,
    page: PageIndex,
    home: Address,
    buffer: BufferIndex,
}

impl LeavingPage {
    fn home(&self) -> Span {
        Span::of_pages(self.home, 1)
    }
}

/// Waits until a process has made its last call.
fn await_end((pid, started): (i32, u64)) {
    let has_threads = || procfs::threads(pid).is_ok_and(|threads| threads.len() > 1);
    while procfs::stat(pid).is_ok_and(|stat| stat.started == started) && has_threads() {
        std::thread::sleep(LOOK_EVERY);
    }
}

impl Driver {
    /// Writes down which file this is.
    pub(in crate::driver) fn write_down_commons(&mut self, id: TargetId, commons: &Commons, tally: &Tally) {
        let Some(estate) = &self.hands.estate else { return };
        let is_recorded = estate.add_commons(id, commons.id, commons.backing().may_be_open, tally);
        if let Some(share) = self.core.share_of(id) {
            estate.set_share(id, share);
        }
        self.note_recorded(id, is_recorded);
    }

    /// All that there are, for the watcher.
    pub fn inherited_commons(&self) -> Vec<InheritedCommons> {
        let inherited =
            |target: &Target| Some(target.commons.as_ref()?.inherited(target.id, Arc::clone(&target.tally)));
        self.targets.iter().flatten().filter_map(inherited).collect()
    }

    /// A file of memory, and what was on its way out of it.
    ///
    /// # Errors
    /// When it cannot be mapped.
    pub(super) fn take_up_commons(&mut self, heir: CommonsHeir) -> Result<Option<Leaving>, Error> {
        let CommonsHeir {
            found: FoundCommons { id, tree, share, file: file_id, may_be_open, leaving, taker, .. }, ..
        } = heir;
        let Some(region) = self.core.regions().of(id).next() else {
            // Nobody was asked for any of it yet.
            self.core.ended(id);
            self.core.reuse(id);
            self.hands.estate.iter().for_each(|estate| estate.remove(id));
            return Ok(None);
        };
        let of = Commons::of(file_id, heir.file, region.span.pages(), may_be_open).map_err(Error::NoSharedMemory)?;
        let home = of.0.span().start;
        self.core.rebase(id, region.span.start, home);
        self.core.assign(id, tree, share);
        self.add_commons(id, of, heir.tally, true);

        let mut pages = Vec::with_capacity(leaving.len());
        for (noted, page, buffer) in leaving {
            let there = self.core.regions().address_of(page).filter(|(of, _)| *of == id);
            // What counts as outside by now has its bytes there. What is to be removed has none.
            match there.filter(|_| self.core.may_capture(page) && self.core.claim_buffer(buffer)) {
                Some((_, home)) => pages.push(LeavingPage { noted, page, home, buffer }),
                None => self.hands.estate.iter().for_each(|estate| estate.end_leaving(id, noted, 1)),
            }
        }
        Ok((!pages.is_empty()).then_some(Leaving { commons: id, taker, pages }))
    }

    /// All targets are there: what they see of these files, and what was under way.
    pub(super) fn settle_commons(&mut self, leaving: Vec<Leaving>) {
        if self.commons.is_empty() {
            return;
        }
        (0..self.targets.len()).for_each(|at| self.look_for_views(at));
        for Leaving { commons: id, taker, pages } in leaving {
            let Some(commons) = self.common_mut(id) else { continue };
            commons.hold(pages.iter().map(LeavingPage::home));
            let file = commons.backing();
            let put_back = move |driver: &mut Self, ()| driver.put_back(id, &pages);
            self.call_on(id, file, vec![taker], |_, taker| await_end(taker), put_back);
        }
        self.announce_removals_again();
    }

    /// What was being taken out was not, or is put back: it is where it was.
    fn put_back(&mut self, id: TargetId, pages: &[LeavingPage]) {
        for &LeavingPage { noted, page, home, buffer } in pages {
            let Some(target) = &self.targets[id.0 as usize] else { return };
            let Some((bytes, _)) = self.hands.buffers.page(buffer) else { continue };
            // One that was removed meanwhile is not to be seen again.
            let is_wanted = self.core.may_capture(page);
            let stop = if is_wanted { target.copy(home, std::slice::from_ref(bytes)).stop } else { None };
            self.common_mut(id).into_iter().for_each(|commons| commons.end_leaving(Span::of_pages(home, 1)));
            if stop.is_none_or(|stop| stop == Stop::Exists) {
                self.core.return_buffer(buffer);
            } else {
                // There is no memory for it: it is outside.
                self.core.captured(page, Captured::Moved(buffer));
                self.core.read(page, buffer, Bytes::Here);
            }
            self.hands.estate.iter().for_each(|estate| estate.end_leaving(id, noted, 1));
        }
    }

    /// Of pages that were about to be removed it is not written down who was at it: all are asked.
    fn announce_removals_again(&mut self) {
        for its in self.commons.clone() {
            let removing = self.core.removing(its);
            let (Some(first), Some(last)) = (removing.first(), removing.last()) else { continue };
            let home = Span { start: first.start, end: last.end };
            for at in 0..self.targets.len() {
                let Some(target) = &mut self.targets[at] else { continue };
                let Some(agent) = &target.agent else { continue };
                // Its threads are looked at, and no pages.
                let (id, nowhere) = (target.id, agent.staging_and_scratch());
                let (number, span) = target.announced.removal(nowhere);
                self.common_mut(its).into_iter().for_each(|commons| commons.removal_begins(id, number, home));
                let _ =
                    self.reports.send(Request::Report(Report::Removal { target: id, span, number, is_shared: true }));
            }
        }
    }

    /// What the pager that was killed had seen as it read the last messages of a target.
    pub(super) fn remember_removals(&mut self, id: TargetId, estate: &Estate) {
        if !self.sees_commons(id) {
            return;
        }
        if let Some(target) = self.target(id) {
            let outlook = target.outlook.get_or_insert_with(|| Outlook::of(&target.uffd));
            outlook.remember(estate.removals());
        }
    }
}
