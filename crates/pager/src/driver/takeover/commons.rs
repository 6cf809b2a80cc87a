//! Memory that several targets have mapped, of a pager that was killed.
//!
//! Its file is there as long as anyone has it mapped, and what the mappings show is asked of the kernel. Home is elsewhere in each pager.
//! What was being taken out is in the file or in a buffer: it is put back where it is not there, and so was never taken out. But a
//! call that somebody holds up is made even when its process was killed: until that has ended, nobody may have these pages.

use std::fs::File;
use std::sync::Arc;
use std::time::Duration;

use spillway_core::evict::{Bytes, Captured};
use spillway_core::page::{BufferIndex, State};
use spillway_core::pager::Stop;
use spillway_core::{Address, PAGE_BYTES_U64, PageIndex, Span, TargetId};

use super::super::Driver;
use crate::commons::Commons;
use crate::error::Error;
use crate::estate::{FoundCommons, NotedRemoval, Punching};
use crate::outlook::Outlook;
use crate::procfs;
use crate::removals::By;
use crate::sys::uffd::Event;
use crate::tally::Tally;
use crate::target::Target;
use crate::watcher::InheritedCommons;

/// How often it is looked whether a process has ended at last.
const LOOK_EVERY: Duration = Duration::from_millis(1);

/// Where nothing ever is: a removal of which it is not known where it is made.
const NOWHERE: Span = Span { start: Address(0), end: Address(PAGE_BYTES_U64) };

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
    /// Who was at some of them.
    punching: Option<Punching>,
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

/// Waits until a thread has made its last call.
fn await_end(Punching { process: (pid, started), thread, .. }: &Punching) {
    let lives = || {
        let is_it =
            procfs::stat(*pid).map_or_else(|error| procfs::is_for_want_of(&error), |stat| stat.started == *started);
        is_it && procfs::is_alive(procfs::thread_stat(*pid, *thread))
    };
    while lives() {
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
    pub(super) fn inherited_commons(&self) -> Vec<InheritedCommons> {
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
            found: FoundCommons { id, tree, share, file: file_id, may_be_open, leaving, punching, .. },
            ..
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
            // What counts as outside by now has its bytes there.
            let is_mapped = self.core.state_of(page) == State::Mapped;
            match there.filter(|_| is_mapped && self.core.claim_buffer(buffer)) {
                Some((_, home)) => pages.push(LeavingPage { noted, page, home, buffer }),
                None => self.hands.estate.iter().for_each(|estate| estate.end_leaving(id, noted, 1)),
            }
        }
        Ok((!pages.is_empty()).then_some(Leaving { commons: id, punching, pages }))
    }

    /// All that was heard of has been applied: what was under way is ended.
    pub(super) fn settle_commons(&mut self, leaving: Vec<Leaving>) {
        for Leaving { commons: id, punching, pages } in leaving {
            // Only what a thread was just at may yet be taken out.
            let is_at =
                |page: &LeavingPage| punching.as_ref().is_some_and(|punching| punching.what.contains(&page.noted));
            let (held, free): (Vec<_>, Vec<_>) = pages.into_iter().partition(is_at);
            self.put_back(id, &free);
            let punching = punching.filter(|_| !held.is_empty());
            let (Some(commons), Some(punching)) = (self.common_mut(id), punching) else { continue };
            commons.hold(held.iter().map(LeavingPage::home));
            let file = commons.backing();
            let put_back = move |driver: &mut Self, ()| driver.put_back(id, &held);
            self.call_on(id, file, vec![punching], |_, punching| await_end(&punching), put_back);
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

    /// Of pages that were about to be removed it is not written down who was at it.
    fn announce_removals_again(&mut self) {
        for its in self.commons.clone() {
            let removing = self.core.removing(its);
            let (Some(first), Some(last)) = (removing.first(), removing.last()) else { continue };
            let home = Span { start: first.start, end: last.end };
            self.await_removal(its, NOWHERE, &[(its, home)], By::Anyone);
        }
    }

    /// Writes down what is seen that threads are about to remove, before they are heard of and go on.
    pub(in crate::driver) fn note_removals(&self, at: usize, outlook: &Outlook) {
        let Some(estate) = &self.hands.estate else { return };
        let noted = outlook.removals().flat_map(|whole| {
            self.shown_to(at, &outlook.removers(whole), whole).into_iter().filter_map(move |(its, view)| {
                let first = self.core.regions().at(its, view.home)?.page_at(view.home);
                Some(NotedRemoval { whole, shown: view.span, first })
            })
        });
        estate.set_removals(&noted.collect::<Vec<_>>());
    }

    /// Applies a removal of shared memory that the dead pager has read of; false where it was none. Where it was may be shown no more by
    /// now, or something else there: whoever did it has gone on, or has ended.
    pub(super) fn replay_removal(&mut self, id: TargetId, event: &Event, removals: &[NotedRemoval]) -> bool {
        let Event::Remove(span) = *event else { return false };
        let of_it = removals.iter().filter(|removal| removal.whole.intersect(span) == Some(span));
        let homes = of_it.filter_map(|NotedRemoval { shown, first, .. }| {
            let part = shown.intersect(span)?;
            let page = first.plus(part.start.pages_since(shown.start));
            let (its, home) = self.core.regions().address_of(page)?;
            self.common(its).map(|_| (its, Span::of_pages(home, part.pages())))
        });
        let homes: Vec<(TargetId, Span)> = homes.collect();
        let is_there = self.target(id).is_some();
        for &(its, home) in &homes {
            let (by, span) = if is_there { (id, span) } else { (its, NOWHERE) };
            self.begin_removal(by, span, &[(its, home)], By::Anyone);
        }
        !homes.is_empty()
    }
}
