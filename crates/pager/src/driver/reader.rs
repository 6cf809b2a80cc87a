//! Reads captured pages out of staging, and looks at them for the store: on another CPU where that is free, as the fault
//! thread shares its own with the threads that fault (docs/decisions/0019). Meanwhile a fault on one of the pages is served
//! from staging.
//!
//! The pages' memory goes with the job and comes back with it. Of the store the job has copies that stay as they are
//! until it gives them back.
//!
//! The thread is in the idle class: a program that wants its CPU goes first. Nothing waits for a batch at first, and when
//! something does, the fault thread hurries it ([`Reader::hurry`]). Where even that does not help, a real-time program has that CPU for
//! itself: the batch is read on the fault thread's, and so are those of the next second.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TryRecvError, TrySendError, sync_channel};
use std::time::Duration;

use spillway_core::evict::Bytes;
use spillway_core::page::BufferIndex;
use spillway_core::pager::Pager;
use spillway_core::{Address, Page, PageIndex};
use spillway_store::{Lent, Preparer, is_zero};

use super::buffers::{Buffer, Buffers};
use crate::procfs;
use crate::sys::agent::BATCH_PAGES;
use crate::sys::clock::now_ns;
use crate::sys::fd::Bell;
use crate::sys::process::{PAGES_AT_A_TIME, read_memory, read_pages};
use crate::sys::sched::{Class, Cpus, current_cpu, idle_class_can_be_left, set_class, thread_id};

/// Fewer pages than this are read sooner than another CPU wakes up.
const WORTH_PAGES: usize = 32;
/// A batch that takes longer has not been let run: on a CPU of its own it takes a quarter of that.
const PATIENCE_NS: u64 = 2_000_000;
/// One that was hurried so long ago, and is not done, has a CPU that it cannot come by.
const STARVES_NS: u64 = 8_000_000;
/// For so long nothing is read on such a CPU.
const SHUNS_NS: u64 = 1_000_000_000;

/// After so many pages that it looked at, 10 us or so, it lets others have the CPU.
const PAGES_IN_A_ROW: usize = 4;

/// For how long it waits for a batch that was announced: captures take a third of that.
const ATTENDS_NS: u64 = 1_000_000;

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
        let mut from = self.staging;
        for some in self.items.chunks_mut(PAGES_AT_A_TIME) {
            read_pages(thread, from, some.iter_mut().map(|item| item.buffer.page_mut()))?;
            from = from.plus_pages(some.len() as u64);
        }
        Ok(())
    }

    fn run(&mut self) {
        // The agent goes with the address space, by exit or exec; a process may get another one. An agent may also end alone.
        let mut read = self.read_as(self.thread);
        let agent_is_gone = matches!(&read, Err(error) if error.raw_os_error() == Some(libc::ESRCH));
        if agent_is_gone {
            read = self.read_as(procfs::living_thread(self.pid).unwrap_or(self.pid));
        }
        for (nth, item) in self.items.iter_mut().enumerate() {
            if self.elsewhere && nth % PAGES_IN_A_ROW == PAGES_IN_A_ROW - 1 {
                // A kernel that takes the CPU away between system calls only would not let a program that is woken here run before.
                thread_id();
            }
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

/// What the thread is told: to read a batch, or none if one comes soon.
type Call = Option<Job>;

/// Waits for the batch that was announced without giving the CPU away; none where it does not come, or not here.
fn attend(calls: &Receiver<Call>, announced: &AtomicBool) -> Option<Job> {
    let until_ns = now_ns() + ATTENDS_NS;
    while announced.load(Relaxed) && now_ns() < until_ns {
        match calls.try_recv() {
            Ok(Some(job)) => return Some(job),
            Ok(None) => {}
            Err(TryRecvError::Empty) => std::hint::spin_loop(),
            Err(TryRecvError::Disconnected) => return None,
        }
    }
    None
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
    calls: SyncSender<Call>,
    /// What was announced is to be waited for awake.
    announced: Arc<AtomicBool>,
    done: Receiver<Job>,
    place: Place,
    /// When the last job went to the thread.
    sent_ns: u64,
    /// The thread is out of the idle class until it is done with its job: since when, or when it was last brought to this CPU; 0 for not.
    hurried_ns: u64,
    /// Where it may run again once it is done, if it was brought.
    brought_from: Option<Cpus>,
    /// Until when nothing is read elsewhere.
    shuns_until_ns: u64,
    /// Where the job under way reads.
    staging: ([i32; 2], Address),
    /// Its pages, in the order of staging; none where nothing was moved.
    order: Vec<(Option<PageIndex>, BufferIndex)>,
}

impl Reader {
    /// A reader with a thread of its own, if one can be had, which rings `bell` when it has read.
    pub(super) fn new(preparer: Option<Preparer>, bell: Arc<Bell>) -> Self {
        // A batch, and what announced it.
        let (calls, to_do) = sync_channel::<Call>(2);
        let (ready, done) = sync_channel(1);
        let thread = Arc::new(AtomicI32::new(0));
        let its = Arc::clone(&thread);
        let announced = Arc::new(AtomicBool::new(false));
        let is_announced = Arc::clone(&announced);
        let work = move || {
            if idle_class_can_be_left() {
                let _ = set_class(0, Class::Idle);
            }
            its.store(thread_id(), Relaxed);
            while let Ok(call) = to_do.recv() {
                let Some(mut job) = call.or_else(|| attend(&to_do, &is_announced)) else { continue };
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
        let staging = ([0; 2], Address(0));
        Self {
            thread,
            calls,
            announced,
            done,
            place: Place::Spare(job),
            sent_ns: 0,
            hurried_ns: 0,
            brought_from: None,
            shuns_until_ns: 0,
            staging,
            order,
        }
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

    /// Begins to read what was noted out of `staging` of the process `pid` whose agent is `thread`: on the other thread if that
    /// may be, and is worth it. [`Reader::finish`] is next. `clean` lends clean copies of pages.
    pub(super) fn begin(
        &mut self,
        [pid, thread]: [i32; 2],
        staging: Address,
        elsewhere: bool,
        buffers: &mut Buffers,
        mut clean: impl FnMut(PageIndex, &mut Preparer) -> Option<Lent>,
    ) {
        let Place::Spare(mut job) = std::mem::replace(&mut self.place, Place::Away) else {
            unreachable!("nothing is captured while pages are being read")
        };
        (job.pid, job.thread, job.staging) = (pid, thread, staging);
        self.staging = ([pid, thread], staging);
        job.elsewhere = elsewhere && self.order.len() >= WORTH_PAGES && !self.shuns();
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
            match self.calls.try_send(Some(job)) {
                Ok(()) => {
                    self.sent_ns = now_ns();
                    return;
                }
                Err(TrySendError::Full(back) | TrySendError::Disconnected(back)) => {
                    job = Job { elsewhere: false, ..back.expect("what was sent comes back") }
                }
            }
        }
        self.dismiss();
        job.run();
        self.place = Place::Done(job);
    }

    /// A batch of so many pages is being captured: wakes the thread if it will be read there, so that its CPU wakes up meanwhile. Not
    /// outside of the idle class, where it would wait at the expense of others.
    pub(super) fn announce(&self, pages: usize) {
        if pages >= WORTH_PAGES && !self.shuns() && idle_class_can_be_left() {
            self.announced.store(true, Relaxed);
            let _ = self.calls.try_send(None);
        }
    }

    /// What was announced does not come, or its CPU is wanted: it waits asleep.
    pub(super) fn dismiss(&self) {
        self.announced.store(false, Relaxed);
    }

    /// Takes over what was read, if it has been; waits for that if told to. True when nothing is under way any more.
    pub(super) fn finish(&mut self, wait: bool, buffers: &mut Buffers, core: &mut Pager) -> bool {
        match self.place {
            Place::Spare(_) => true,
            Place::Away if wait => {
                let job = loop {
                    self.hurry();
                    match self.done.recv_timeout(Duration::from_nanos(STARVES_NS)) {
                        Ok(job) => break job,
                        Err(error) => assert!(error == RecvTimeoutError::Timeout, "the reader ends after this"),
                    }
                };
                self.take_over(job, buffers, core);
                true
            }
            Place::Away => self.done.try_recv().map(|job| self.take_over(job, buffers, core)).is_ok(),
            Place::Done(_) => {
                if let Place::Done(job) = std::mem::replace(&mut self.place, Place::Away) {
                    self.take_over(job, buffers, core);
                }
                true
            }
        }
    }

    #[inline(never)]
    fn take_over(&mut self, mut job: Job, buffers: &mut Buffers, core: &mut Pager) {
        if std::mem::take(&mut self.hurried_ns) > 0 {
            self.put_in(if idle_class_can_be_left() { Class::Idle } else { Class::Normal });
        }
        if let Some(cpus) = self.brought_from.take() {
            // Where that fails it is slower, and nothing else.
            let _ = cpus.confine(self.thread());
        }
        for (item, (page, buffer)) in job.items.drain(..).zip(self.order.drain(..)) {
            buffers.give_back(buffer, item.buffer);
            if let Some(page) = page {
                core.read(page, buffer, item.bytes);
            }
        }
        self.place = Place::Spare(job);
    }

    /// For how long the thread may still be left to itself, in nanoseconds, before it is hurried, or hurried once more; none where it has no
    /// batch.
    pub(super) fn patience_ns(&self) -> Option<u64> {
        let until_ns = if self.hurried_ns > 0 { self.hurried_ns + STARVES_NS } else { self.sent_ns + PATIENCE_NS };
        matches!(self.place, Place::Away).then(|| until_ns.saturating_sub(now_ns()))
    }

    /// Has the thread go before programs, and before the pager's other threads, until its batch is read; on this CPU if it was told so long ago.
    /// Only this thread changes the class of the other, which therefore cannot miss that.
    pub(super) fn hurry(&mut self) {
        if !matches!(self.place, Place::Away) {
            return;
        }
        if self.hurried_ns == 0 {
            self.hurried_ns = now_ns();
            self.put_in(Class::Urgent);
        } else if self.patience_ns() == Some(0) {
            self.bring();
        }
    }

    /// Has the thread run on this CPU until its batch is read. A program of a real-time class never gives the other away, and the kernel leaves
    /// the twentieth that such programs must to ordinary threads, which this one is not.
    #[inline(never)]
    fn bring(&mut self) {
        let (thread, now_ns) = (self.thread(), now_ns());
        (self.hurried_ns, self.shuns_until_ns) = (now_ns, now_ns + SHUNS_NS);
        if let (Some(cpu), Ok(allowed)) = (current_cpu(), Cpus::of(thread)) {
            self.brought_from.get_or_insert(allowed);
            let _ = Cpus::one(cpu).confine(thread);
        }
    }

    /// Whether the other CPU was of no use a moment ago.
    fn shuns(&self) -> bool {
        self.shuns_until_ns > 0 && now_ns() < self.shuns_until_ns
    }

    /// Changes the class of the other thread. Where that is refused it is slower, and nothing else.
    fn put_in(&self, class: Class) {
        let thread = self.thread();
        // Zero would be this one.
        if thread != 0 {
            let _ = set_class(thread, class);
        }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::sched::class_and_niceness;
    use spillway_core::PAGE_BYTES;
    use spillway_core::pager::{Budget, Config};

    fn policy(thread: i32) -> i32 {
        class_and_niceness(thread).0
    }

    /// So many pages as are read elsewhere.
    const COUNT: u32 = 32;
    const _: () = assert!(COUNT as usize == WORTH_PAGES);

    /// Pages of ours that play staging, and who reads them to where.
    fn small_batch() -> (Vec<Page>, Buffers, Pager, Reader) {
        let staged = (1..=COUNT).map(|nth| [u8::try_from(nth).expect("few"); PAGE_BYTES]).collect();
        let core = Pager::new(Config { budget: Budget::Pages(64), buffers: COUNT, write_batch: 1 });
        (staged, Buffers::new(COUNT), core, Reader::new(None, Arc::new(Bell::new().expect("an eventfd"))))
    }

    fn begin(reader: &mut Reader, staged: &[Page], elsewhere: bool, buffers: &mut Buffers) {
        (0..COUNT).for_each(|buffer| reader.note(None, BufferIndex(buffer)));
        let (ours, from) = ([std::process::id().cast_signed(), thread_id()], Address(staged.as_ptr().addr() as u64));
        reader.begin(ours, from, elsewhere, buffers, |_, _| None);
    }

    #[test]
    fn a_batch_is_read_however_it_was_announced() {
        let (staged, mut buffers, mut core, mut reader) = small_batch();
        type Announce = fn(&mut Reader);
        let nothing: Announce = |_| {};
        let announced: Announce = |reader| reader.announce(WORTH_PAGES);
        let twice: Announce = |reader| (0..2).for_each(|_| reader.announce(WORTH_PAGES));
        let dismissed: Announce = |reader| {
            reader.announce(WORTH_PAGES);
            reader.dismiss();
        };
        let late: Announce = |reader| {
            reader.announce(WORTH_PAGES);
            std::thread::sleep(std::time::Duration::from_nanos(2 * ATTENDS_NS));
        };
        for elsewhere in [true, false] {
            for (nth, announce) in [nothing, announced, twice, dismissed, late, announced].into_iter().enumerate() {
                announce(&mut reader);
                begin(&mut reader, &staged, elsewhere, &mut buffers);
                assert!(reader.finish(true, &mut buffers, &mut core));
                for (buffer, page) in (0..COUNT).zip(&staged) {
                    assert!(buffers.page(BufferIndex(buffer)).expect("it is back").0 == page, "{elsewhere} {nth}");
                }
                // What was read must not be there already the next time.
                (1..COUNT).for_each(|buffer| buffers.copy(BufferIndex(0), BufferIndex(buffer)));
            }
        }
    }

    /// In the idle class it may not be let run for as long as a program computes.
    #[test]
    fn a_batch_that_something_waits_for_is_read_before_programs_run() {
        let (staged, mut buffers, mut core, mut reader) = small_batch();
        while reader.thread() == 0 {
            std::thread::yield_now();
        }
        let at_first = if idle_class_can_be_left() { libc::SCHED_IDLE } else { libc::SCHED_OTHER };
        // Real-time threads may be forbidden.
        let urgent = || set_class(0, Class::Urgent).map_or(libc::SCHED_OTHER, |()| policy(thread_id()));
        let hurries = std::thread::spawn(urgent).join().expect("no panic");
        assert_eq!((policy(reader.thread()), reader.patience_ns()), (at_first, None));
        for hurried in [true, false] {
            begin(&mut reader, &staged, true, &mut buffers);
            assert!(reader.patience_ns().is_some_and(|left| left <= PATIENCE_NS));
            if hurried {
                reader.hurry();
                assert_eq!(policy(reader.thread()), hurries);
                assert!(reader.patience_ns().is_some_and(|left| left > PATIENCE_NS && left <= STARVES_NS));
            }
            assert!(reader.finish(true, &mut buffers, &mut core));
            assert_eq!((policy(reader.thread()), reader.patience_ns()), (at_first, None));
            let read = |nth: usize| buffers.page(BufferIndex(u32::try_from(nth).expect("few"))).expect("it is back").0;
            assert!((0..WORTH_PAGES).all(|nth| read(nth) == &staged[nth]));
        }
    }

    /// A program of a real-time class may have the other CPU for itself.
    #[test]
    fn a_batch_that_no_time_is_left_for_is_read_on_this_cpu() {
        let (staged, mut buffers, mut core, mut reader) = small_batch();
        while reader.thread() == 0 {
            std::thread::yield_now();
        }
        let cpus = |reader: &Reader| Cpus::of(reader.thread()).expect("it runs").count();
        let all = cpus(&reader);
        begin(&mut reader, &staged, true, &mut buffers);
        reader.hurry();
        // It has been read by then, which only the reader knows.
        std::thread::sleep(Duration::from_nanos(STARVES_NS));
        reader.hurry();
        assert_eq!(cpus(&reader), 1);
        assert!(reader.finish(true, &mut buffers, &mut core));
        assert_eq!(cpus(&reader), all);
        // For a while it is not tried again.
        begin(&mut reader, &staged, true, &mut buffers);
        assert!(matches!(reader.place, Place::Done(_)));
        assert!(reader.finish(true, &mut buffers, &mut core));
    }
}
