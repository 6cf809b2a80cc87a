//! What a process has mapped: registered, and searched for resident pages.

use std::sync::mpsc::channel;
use std::time::Instant;

use spillway_core::{Address, Span};

use super::Watcher;
use super::process::Process;
use crate::choice::Choice;
use crate::driver::{Command, portions};
use crate::procfs::{self, Mapping, Size};
use crate::stretch::stretches;
use crate::sys::clock::thread_time;
use crate::sys::process::robust_list;

/// Reading mappings may take this share of the time: one part in twenty, as each reading may meet a change that the kernel then
/// refuses (README.md, "Rare corners"). While memory grows, one part of a CPU's time: all time passes while a program does not let
/// the fault thread answer, which may be just the program that grows.
const MAPS_SHARE: u32 = 20;
/// How often mappings are read in a row while they change.
const READINGS_MAX: u32 = 4;
/// How far before its robust list a thread's descriptor may begin, with its thread id in it: 0x2e0 bytes in glibc 2.36.
const DESCRIPTOR_BYTES: u64 = 0x300;

/// Which pages to look for in a forked child.
#[derive(Clone, Copy)]
pub(super) enum Whose {
    /// Those that are mapped in it alone.
    ItsOwn,
    /// All.
    Anyones,
}

impl Watcher {
    /// Registers what is new in a process, and tells the fault thread which pages of it are resident. Whether there was anything.
    pub(super) fn read_mappings(&mut self, pid: i32) -> bool {
        let (begun, worked) = (Instant::now(), thread_time());
        let Some(&Process { target: Some(target), staging, handed: None, .. }) = self.processes.get(&pid) else {
            return false;
        };
        let (mut size, mut new) = (Size::default(), Vec::new());
        for _ in 0..READINGS_MAX {
            size = procfs::size(pid).unwrap_or_default();
            let Ok(mappings) = procfs::mappings(pid) else { return false };
            let stretches = stretches(&mappings, |mapping| is_managed(self.choice, mapping, staging));
            let (reply, answer) = channel();
            self.send(Command::Register { target, stretches, reply });
            let Some(registered) = self.hear(&answer) else { return false };
            self.join_commons(pid, &mappings);
            let none = registered.is_empty();
            new.extend(registered);
            // What was mapped meanwhile beside a mapping becomes one with it while it is untouched.
            if none || procfs::size(pid).is_ok_and(|now| now.total_pages == size.total_pages) {
                break;
            }
        }
        let Some(process) = self.processes.get_mut(&pid) else { return false };
        let is_new = !new.is_empty();
        if let Some(pagemap) = &process.pagemap {
            for span in new {
                let mut found = Vec::new();
                // A process that is gone has nothing to be found.
                let _ = pagemap.populated(span, |span| found.push(span));
                for spans in portions(found) {
                    let _ = self.commands.send(Command::Found { target, spans });
                    self.bell.ring();
                }
            }
        }
        let _ = self.commands.send(Command::Scanned { target });
        // A thread that ends cannot wait for a fault: what the kernel reads and clears of it then must be there.
        let threads = procfs::threads(pid).unwrap_or_default();
        let lists = threads.iter().filter_map(|&thread| robust_list(thread));
        let addresses = lists.flat_map(|head| [Address(head.0.saturating_sub(DESCRIPTOR_BYTES)), head]).collect();
        let _ = self.commands.send(Command::Keep { target, addresses });
        process.seen = size;
        process.read_at = Some(begun);
        let now = Instant::now();
        self.maps_rest_until = Some(now + begun.elapsed() * MAPS_SHARE);
        self.growth_rests_until = Some(now + (thread_time() - worked) * MAPS_SHARE);
        is_new
    }

    /// Tells the fault thread which pages are resident in regions that a child has from its parent, or only those that it does
    /// not share with anyone; how many these are.
    pub(super) fn find_resident(&mut self, pid: i32, whose: Whose) -> u64 {
        let Some(&Process { target: Some(target), staging, .. }) = self.processes.get(&pid) else { return 0 };
        let Ok(mappings) = procfs::mappings(pid) else { return 0 };
        let (reply, begun) = channel();
        self.send(Command::Register { target, stretches: Vec::new(), reply });
        if self.hear(&begun).is_none() {
            return 0;
        }
        let Some(pagemap) = self.processes.get(&pid).and_then(|process| process.pagemap.as_ref()) else { return 0 };
        let mut found: Vec<Span> = Vec::new();
        let mut note = |span: Span| match found.last_mut().filter(|last| last.end == span.start) {
            Some(last) => last.end = span.end,
            None => found.push(span),
        };
        for mapping in mappings.iter().filter(|mapping| is_managed(self.choice, mapping, staging)) {
            // A process that is gone has nothing to be found.
            let _ = match whose {
                Whose::Anyones => pagemap.populated(mapping.span, &mut note),
                Whose::ItsOwn => pagemap.exclusive(mapping.span, &mut note),
            };
        }
        let pages = found.iter().map(|span| span.pages()).sum();
        portions(found).into_iter().for_each(|spans| self.send(Command::Found { target, spans }));
        self.send(Command::Scanned { target });
        pages
    }
}

/// Whether it may be registered: not our own mapping.
fn is_managed(choice: Choice, mapping: &Mapping, staging: Option<Span>) -> bool {
    choice.takes(mapping) && staging.is_none_or(|staging| mapping.span.intersect(staging).is_none())
}
