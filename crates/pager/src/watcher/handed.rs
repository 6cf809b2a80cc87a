//! Monitors that hand over the userfaultfd of their guest's memory: served at once, evicted from when an agent is in.
//!
//! Nothing but that memory is managed in them, nor are their children: their userfaultfd tells too little of the rest.

use std::sync::Arc;
use std::sync::mpsc::channel;

use spillway_core::{PAGE_BYTES_U64, Span, TargetId};
use spillway_store::snapshot::Image;

use super::Watcher;
use super::forks::Orphan;
use super::process::Process;
use crate::adopt;
use crate::driver::{Command, portions};
use crate::error::Error;
use crate::handed::{Handed, Placed, Region};
use crate::procfs;
use crate::stretch::Stretch;
use crate::sys::pagemap::Pagemap;
use crate::sys::uffd::Uffd;
use crate::tally::Tally;

/// Pages laid out between two looks of the fault thread at faults: a fraction of a millisecond.
const LAY_OUT_PAGES: u64 = 4096;

impl Watcher {
    /// Serves the memory that a monitor has handed over, and puts an agent in.
    pub(super) fn take_in(&mut self, Placed { handed, image }: Placed) -> Result<(), Error> {
        let Handed { pid, uffd, regions } = handed;
        adopt::examine(pid)?;
        let is_served = |process: &Process| process.handed.is_some() && process.target.is_some();
        let is_awaited = self.orphans.iter().any(|orphan| orphan.pid == Some(pid));
        if is_awaited || self.processes.get(&pid).is_some_and(is_served) {
            return Err(Error::AlreadyAdopted(pid));
        }
        let memory: Vec<Span> = regions.iter().map(|region| region.span).collect();
        let copy = uffd.clone();
        let tally = self.tally_of(pid, None);
        let target = self.lay_out(pid, uffd, &tally, &regions, image.as_ref())?;
        let mut process = Process::new(procfs::stat(pid).map_or(0, |stat| stat.started), Arc::clone(&tally));
        process.handed = Some(memory);
        self.processes.insert(pid, process);
        self.orphans.push(Orphan::new(target, target, copy, Some(pid), tally));
        let adopted = self.adopt(pid, Some(self.orphans.len() - 1));
        self.settle_handed(target, pid, adopted)
    }

    /// Makes it a target, and tells the fault thread where its pages are. Until then none of its faults is read.
    fn lay_out(
        &mut self,
        pid: i32,
        uffd: Uffd,
        tally: &Arc<Tally>,
        regions: &[Region],
        image: Option<&Image>,
    ) -> Result<TargetId, Error> {
        // From now on a page can only come by a fault: what is not there now is nowhere but in the image.
        let registering = |error| Error::System { what: "registering the memory that was handed over", error };
        regions.iter().try_for_each(|region| uffd.register(region.span)).map_err(registering)?;
        let opening = |error| Error::System { what: "reading the target's page map", error };
        let pagemap = Pagemap::open(pid).map_err(opening)?;
        let mut there: Vec<Span> = Vec::new();
        let scanned = regions.iter().try_for_each(|region| pagemap.populated(region.span, |span| there.push(span)));
        scanned.map_err(opening)?;

        let (reply, answer) = channel();
        self.send(Command::Hand { pid, uffd, tally: Arc::clone(tally), share: tally.share(), reply });
        let target = self.hear(&answer).ok_or(Error::Ended(pid))?;
        let stretches = regions.iter().map(|region| Stretch { mappings: vec![region.span], end: region.span.end });
        let (reply, answer) = channel();
        self.send(Command::Register { target, stretches: stretches.collect(), reply });
        self.hear(&answer);
        if let Some(image) = image {
            for region in regions {
                let missing = region.span.without(there.iter().copied());
                missing.into_iter().for_each(|part| self.lay_out_part(target, part, region, image));
            }
        }
        portions(there).into_iter().for_each(|spans| self.send(Command::Found { target, spans }));
        self.send(Command::Scanned { target });
        let has = regions.iter().map(|region| region.span).collect();
        self.send(Command::Inherit { target, wiped: Vec::new(), has, seen: None });
        Ok(target)
    }

    fn lay_out_part(&mut self, target: TargetId, part: Span, region: &Region, image: &Image) {
        let mut start = part.start;
        while start < part.end {
            let pages = part.end.pages_since(start).min(LAY_OUT_PAGES);
            let number = region.offset / PAGE_BYTES_U64 + start.pages_since(region.span.start);
            let first = image.handle(number).expect("regions beyond the file were refused");
            let (reply, answer) = channel();
            self.send(Command::LayOut { target, span: Span::of_pages(start, pages), first, reply });
            self.hear(&answer);
            start = start.plus_pages(pages);
        }
    }

    /// An agent was to be put in. A monitor that would not stop is served meanwhile, and tried again; one that cannot have an
    /// agent is not served any more.
    pub(super) fn settle_handed(
        &mut self,
        target: TargetId,
        pid: i32,
        adopted: Result<(), Error>,
    ) -> Result<(), Error> {
        let error = match adopted {
            Ok(()) => return Ok(()),
            Err(Error::DidNotStop(_)) => {
                self.orphans.iter_mut().filter(|orphan| orphan.target == target).for_each(Orphan::try_later);
                return Ok(());
            }
            Err(Error::OtherMemory(_)) => Error::NotItsMemory(pid),
            Err(error) => error,
        };
        self.orphans.retain(|orphan| orphan.target != target);
        self.processes.remove(&pid);
        self.end_target(target);
        if let Ok(mut refused) = self.shared.refused.lock() {
            *refused = Some(error.to_string());
        }
        Err(error)
    }
}
