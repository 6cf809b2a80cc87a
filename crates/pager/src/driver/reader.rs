//! Reads captured pages out of staging, and looks at them for the store: on another CPU where that is free, as the fault
//! thread shares its own with the threads that fault (docs/decisions/0019). Meanwhile a fault on one of the pages is served
//! from staging.
//!
//! The pages' memory goes with the job and comes back with it. Of the store the job has copies that stay as they are
//! until it gives them back.

use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicI32;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};

use spillway_core::evict::Bytes;
use spillway_core::page::BufferIndex;
use spillway_core::pager::Pager;
use spillway_core::{Address, Page, PageIndex};
use spillway_store::{Lent, Preparer, is_zero};

use super::buffers::{Buffer, Buffers};
use crate::adopt::Agent;
use crate::procfs;
use crate::sys::agent::BATCH_PAGES;
use crate::sys::fd::Bell;
use crate::sys::process::{read_memory, read_pages};
use crate::sys::sched::thread_id;

/// Fewer pages than this are read sooner than another CPU wakes up.
const WORTH_PAGES: usize = 32;

/// One batch.
struct Job {
    /// The process, and its agent's thread.
    pid: i32,
    thread: i32,
    staging: Address,
    /// In the order of staging.
    items: Vec<Item>,
    preparer: Option<Preparer>,
    /// Whether a CPU has the time for more than what faults may wait for.
    elsewhere: bool,
}

struct Item {
    buffer: Buffer,
    bytes: Bytes,
    clean: Option<Lent>,
}

impl Job {
    fn read_as(&mut self, thread: i32) -> io::Result<()> {
        read_pages(thread, self.staging, self.items.iter_mut().map(|item| item.buffer.page_mut()))
    }

    fn run(&mut self) {
        // The agent goes with the address space, by exit or exec; a process may get another one. An agent may also end alone.
        let mut read = self.read_as(self.thread);
        let agent_is_gone = matches!(&read, Err(error) if error.raw_os_error() == Some(libc::ESRCH));
        if agent_is_gone {
            read = self.read_as(procfs::living_thread(self.pid).unwrap_or(self.pid));
        }
        for item in &mut self.items {
            let (page, known) = item.buffer.parts();
            item.bytes = match &read {
                // They were moved away, and there is no other copy: zeros must not take their place.
                Err(_) if agent_is_gone => Bytes::Gone,
                Err(_) => Bytes::Lost,
                Ok(()) if is_zero(page) => Bytes::Zero,
                Ok(()) => Bytes::Here,
            };
            match &mut self.preparer {
                Some(preparer) if item.bytes == Bytes::Here && self.elsewhere => {
                    preparer.prepare(page, item.clean, known);
                }
                Some(preparer) if item.bytes == Bytes::Here => preparer.hash(page, known),
                _ => known.forget(),
            }
        }
        self.preparer.iter_mut().for_each(Preparer::give_back);
    }
}

/// Where the job is.
enum Place {
    /// Here, and not begun.
    Spare(Job),
    /// With the thread.
    Away,
    /// Here, and done.
    Done(Job),
}

/// See the module's documentation.
pub(super) struct Reader {
    /// The thread's id, once it runs.
    thread: Arc<AtomicI32>,
    jobs: SyncSender<Job>,
    done: Receiver<Job>,
    place: Place,
    /// Where the job under way reads.
    staging: ([i32; 2], Address),
    /// Its pages, in the order of staging; none where nothing was moved.
    order: Vec<(Option<PageIndex>, BufferIndex)>,
}

impl Reader {
    /// A reader with a thread of its own, if one can be had, which rings `bell` when it has read.
    pub(super) fn new(preparer: Option<Preparer>, bell: Arc<Bell>) -> Self {
        let (jobs, to_do) = sync_channel::<Job>(1);
        let (ready, done) = sync_channel(1);
        let thread = Arc::new(AtomicI32::new(0));
        let its = Arc::clone(&thread);
        let work = move || {
            its.store(thread_id(), Relaxed);
            for mut job in to_do {
                job.run();
                if ready.send(job).is_err() {
                    return;
                }
                bell.ring();
            }
        };
        // Without it, the channel is closed, and all is read here.
        let _ = std::thread::Builder::new().name("reader".into()).spawn(work);
        let items = Vec::with_capacity(BATCH_PAGES);
        let job = Job { pid: 0, thread: 0, staging: Address(0), items, preparer, elsewhere: false };
        let order = Vec::with_capacity(BATCH_PAGES);
        Self { thread, jobs, done, place: Place::Spare(job), staging: ([0; 2], Address(0)), order }
    }

    /// The other thread; 0 when there is none.
    pub(super) fn thread(&self) -> i32 {
        self.thread.load(Relaxed)
    }

    /// Whether pages are being read. Nothing may be captured meanwhile, nor staging dropped, nor a buffer taken.
    pub(super) fn is_at_work(&self) -> bool {
        !matches!(self.place, Place::Spare(_))
    }

    /// Notes the next page of staging, if it was moved there, and the buffer that was set aside for it.
    pub(super) fn note(&mut self, page: Option<PageIndex>, buffer: BufferIndex) {
        self.order.push((page, buffer));
    }

    /// Begins to read what was noted: on the other thread if that may be, and is worth it. [`Reader::finish`] is next.
    /// `clean` lends clean copies of pages.
    pub(super) fn begin(
        &mut self,
        agent: &Agent,
        elsewhere: bool,
        buffers: &mut Buffers,
        mut clean: impl FnMut(PageIndex, &mut Preparer) -> Option<Lent>,
    ) {
        let Place::Spare(mut job) = std::mem::replace(&mut self.place, Place::Away) else {
            unreachable!("nothing is captured while pages are being read")
        };
        (job.pid, job.thread, job.staging) = (agent.pid, agent.thread, agent.layout.staging);
        self.staging = ([agent.pid, agent.thread], agent.layout.staging);
        job.elsewhere = elsewhere && self.order.len() >= WORTH_PAGES;
        let elsewhere = job.elsewhere;
        let preparer = &mut job.preparer;
        let mut clean = |page: Option<PageIndex>| {
            let preparer = preparer.as_mut().filter(|_| elsewhere)?;
            clean(page?, preparer)
        };
        let mut item = |(page, buffer): &(Option<PageIndex>, BufferIndex)| Item {
            buffer: buffers.lend(*buffer),
            bytes: Bytes::Lost,
            clean: clean(*page),
        };
        job.items.extend(self.order.iter().map(&mut item));
        if elsewhere {
            match self.jobs.try_send(job) {
                Ok(()) => return,
                Err(TrySendError::Full(back) | TrySendError::Disconnected(back)) => {
                    job = Job { elsewhere: false, ..back }
                }
            }
        }
        job.run();
        self.place = Place::Done(job);
    }

    /// Takes over what was read, if it has been; waits for that if told to. True when nothing is under way any more.
    pub(super) fn finish(&mut self, wait: bool, buffers: &mut Buffers, core: &mut Pager) -> bool {
        let mut job = match std::mem::replace(&mut self.place, Place::Away) {
            Place::Done(job) => job,
            Place::Spare(job) => {
                self.place = Place::Spare(job);
                return true;
            }
            Place::Away if wait => self.done.recv().expect("the reader ends after this"),
            Place::Away => match self.done.try_recv() {
                Ok(job) => job,
                Err(_) => return false,
            },
        };
        for (item, (page, buffer)) in job.items.drain(..).zip(self.order.drain(..)) {
            buffers.give_back(buffer, item.buffer);
            if let Some(page) = page {
                core.read(page, buffer, item.bytes);
            }
        }
        self.place = Place::Spare(job);
        true
    }

    /// Copies from staging what is being read into `buffer`.
    ///
    /// # Errors
    /// When it cannot be read, which loses the page.
    pub(super) fn copy(&self, buffer: BufferIndex, into: &mut Page) -> io::Result<()> {
        let at = self.order.iter().position(|(_, its)| *its == buffer).ok_or(io::ErrorKind::NotFound)?;
        let ([pid, thread], staging) = self.staging;
        let staged = staging.plus_pages(at as u64);
        // The process's first thread may have ended before the others, and so may the agent.
        read_memory(pid, staged, into).or_else(|_| read_memory(thread, staged, into))
    }
}
