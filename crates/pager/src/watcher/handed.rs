//! Monitors that hand over the userfaultfd of their guest's memory: served at once, evicted from when an agent is in.
//!
//! Nothing but that memory is managed in them, nor are their children: their userfaultfd tells too little of the rest. Where it is shared,
//! its pages leave by its file, as those of all that several have mapped do, and the agent is there to keep it in its place.

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

use spillway_core::{PAGE_BYTES_U64, Span, TargetId};
use spillway_store::snapshot::Image;

use super::Watcher;
use super::forks::Orphan;
use super::process::Process;
use crate::adopt;
use crate::driver::{Command, portions};
use crate::error::Error;
use crate::handed::{Handed, Placed, Plugged, Region};
use crate::procfs::{self, FileId, Mapping};
use crate::stretch::Stretch;
use crate::sys::pagemap::Pagemap;
use crate::sys::uffd::Uffd;
use crate::tally::Tally;

/// Pages laid out between two looks of the fault thread at faults: a fraction of a millisecond.
const LAY_OUT_PAGES: u64 = 4096;
/// Mappings of what is handed over at once: twice as many as regions can be.
const MAPPINGS_MAX: usize = 512;
/// How often an agent that is at something is asked again to keep memory in its place, and after how long.
const HOLD_TRIES: u32 = 50;
const HOLD_AGAIN_AFTER: Duration = Duration::from_millis(1);

impl Watcher {
    /// Serves the memory that a monitor has handed over, and puts an agent in.
    pub(super) fn take_in(&mut self, Placed { handed, image }: Placed) -> Result<(), Error> {
        let Handed { pid, uffd, regions, is_shared, .. } = handed;
        adopt::examine(pid)?;
        let is_served = |process: &Process| process.handed.is_some() && process.target.is_some();
        let is_awaited = self.orphans.iter().any(|orphan| orphan.pid == Some(pid));
        if is_awaited || self.processes.get(&pid).is_some_and(is_served) {
            return Err(Error::AlreadyAdopted(pid));
        }
        let copy = uffd.clone();
        let tally = self.tally_of(pid, None);
        let mut process = Process::new(procfs::stat(pid).map_or(0, |stat| stat.started), Arc::clone(&tally));
        let target = if is_shared {
            let (target, mappings) = self.show(pid, uffd, &tally, &regions)?;
            process.handed = Some(mappings.iter().map(|mapping| mapping.span).collect());
            target
        } else {
            process.handed = Some(regions.iter().map(|region| region.span).collect());
            self.lay_out(pid, uffd, &tally, &regions, image.as_ref())?
        };
        self.processes.insert(pid, process);
        self.orphans.push(Orphan::new(target, Some(target), copy, Some(pid), tally));
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

        let target = self.hand(pid, uffd, tally, false)?;
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

    fn hand(&mut self, pid: i32, uffd: Uffd, tally: &Arc<Tally>, looks_into: bool) -> Result<TargetId, Error> {
        let (reply, answer) = channel();
        self.send(Command::Hand { pid, uffd, tally: Arc::clone(tally), share: tally.share(), looks_into, reply });
        self.hear(&answer).ok_or(Error::Ended(pid))
    }

    /// Makes one a target that shares its memory, which is managed as what several have mapped is; with those mappings.
    fn show(
        &mut self,
        pid: i32,
        uffd: Uffd,
        tally: &Arc<Tally>,
        regions: &[Region],
    ) -> Result<(TargetId, Vec<Mapping>), Error> {
        let mappings = shared_mappings(pid, regions)?;
        let target = self.hand(pid, uffd, tally, true)?;
        for mapping in &mappings {
            if let Err(error) = self.join_handed(target, pid, mapping) {
                self.end_target(target);
                return Err(error);
            }
        }
        self.send(Command::Inherit { target, wiped: Vec::new(), has: Vec::new(), seen: None });
        Ok((target, mappings))
    }

    fn join_handed(&mut self, target: TargetId, pid: i32, mapping: &Mapping) -> Result<(), Error> {
        let joined = mapping.file.is_some_and(|id| self.join(target, pid, id, mapping));
        if joined { Ok(()) } else { Err(Error::NotSharable { pid, span: mapping.span }) }
    }

    /// Manages what was plugged into a guest whose memory is.
    pub(super) fn plug_in(&mut self, Plugged { pid, started, region }: Plugged) -> Result<(), Error> {
        let process = self.processes.get(&pid).filter(|it| it.handed.is_some() && it.started == started);
        let process = process.ok_or(Error::Ended(pid))?;
        let without_agent = || self.orphans.iter().find(|it| it.pid == Some(pid)).map(|orphan| orphan.target);
        let (has_agent, target) = (process.target.is_some(), process.target.or_else(without_agent));
        let target = target.ok_or(Error::Ended(pid))?;
        // They have stayed in their place.
        let known = process.handed.clone().unwrap_or_default();
        let new = shared_mappings(pid, &[region])?.into_iter().filter(|mapping| !known.contains(&mapping.span));
        for mapping in new {
            // Without an agent it is done when there is one.
            if has_agent {
                self.hold(target, pid, mapping.span)?;
            }
            self.join_handed(target, pid, &mapping)?;
            let Some(process) = self.processes.get_mut(&pid) else { return Err(Error::Ended(pid)) };
            process.handed.iter_mut().for_each(|memory| memory.push(mapping.span));
        }
        Ok(())
    }

    /// Has an agent keep memory from forked children, and in its place.
    fn hold(&mut self, target: TargetId, pid: i32, span: Span) -> Result<(), Error> {
        for _ in 0..HOLD_TRIES {
            let (reply, answer) = channel();
            self.send(Command::Hold { target, span, reply });
            match self.hear(&answer).ok_or(Error::Ended(pid))? {
                Some(true) => return Ok(()),
                Some(false) => return Err(Error::NotSharable { pid, span }),
                None => std::thread::sleep(HOLD_AGAIN_AFTER),
            }
        }
        Err(Error::DidNotStop(pid))
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
        self.tell_refused(pid, Some(&error));
        Err(error)
    }
}

/// The mappings of the files that these regions of a process are in.
fn shared_mappings(pid: i32, regions: &[Region]) -> Result<Vec<Mapping>, Error> {
    let reading = |error| Error::System { what: "reading the target's mappings", error };
    let mut mappings = procfs::mappings(pid).map_err(reading)?;
    mappings.retain(Mapping::is_common);
    let is_named = |mapping: &&Mapping| regions.iter().any(|region| region.span.intersect(mapping.span).is_some());
    let files: Vec<FileId> = mappings.iter().filter(is_named).filter_map(|mapping| mapping.file).collect();
    mappings.retain(|mapping| mapping.file.is_some_and(|file| files.contains(&file)));
    // They were told of only a moment ago.
    let gap = |region: &&Region| !region.span.without(mappings.iter().map(|mapping| mapping.span)).is_empty();
    match regions.iter().find(gap) {
        Some(region) => Err(Error::NotSharable { pid, span: region.span }),
        None if mappings.len() > MAPPINGS_MAX => Err(Error::NotSharable { pid, span: mappings[MAPPINGS_MAX].span }),
        None => Ok(mappings),
    }
}
