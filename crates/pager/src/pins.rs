//! Pins: whether the kernel holds a page of shared memory for more than its file and its mappings.
//!
//! A device, `O_DIRECT`, io_uring or a pipe reaches such a page past all page tables. When it is punched out of its file, what
//! they write goes to a page that is nobody's any more. No interface of the kernel shows this, so the page's own description
//! (`struct page`, `include/linux/mm_types.h`) is read where it is: in an array of all pages, by the number of the frame.
//!
//! - Whatever is in doubt is pinned, also what cannot be read: a wrong *pinned* costs memory, a wrong *free* a write.
//! - A page is free only if its description names the file and the index that are asked for. So a wrong place in the array,
//!   a page that has moved meanwhile, or one that is being swapped out, never looks free.
//! - Both counts lie in one word, which the kernel copies with one load: they are of one moment. The kernel takes a
//!   reference before it counts a mapping, and gives it back afterwards, so what is under way looks pinned.
//! - An answer is of its moment. Look when no mapping lets the page be written to any more: who pins it through one, to write,
//!   looks at the page table again after he took his reference, so either he sees that or his reference is seen here.
//!   Nothing of this holds up who pins it to read, or writes by a descriptor of the file (`write`, `memfd_pin_folios`).
//!
//! Each CPU holds a reference to pages that were just added, read or written by system calls, or left by a process that ended,
//! until it has 31 of a kind (`mm/swap.c`, `folio_batch`) or is told to let go ([`Pins::settle`]). They look pinned meanwhile,
//! which is right: to the kernel they are held. On a CPU that is idle that may be long.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use rustix::fs::{MemfdFlags, memfd_create};
use spillway_core::{Address, PAGE_BYTES};

use crate::btf::{self, Btf};
use crate::kernel_file::Descriptors;
use crate::sys::bpf::KernelMemory;
use crate::sys::pagemap::{frame_of, settle_pages};
use crate::sys::window::Window;

/// What the array has for each page: a line of the cache.
const DESCRIPTION_WORDS: usize = 8;
const DESCRIPTION_BYTES: usize = 8 * DESCRIPTION_WORDS;
/// Pages that must be described as they are before the array is believed to be found.
const SAMPLE_PAGES: usize = 8;
/// Of `compound_head`: this is a later page of a large folio.
const TAIL: u64 = 1;
/// Of an entry of `struct xarray`: it is no pointer to a page.
const NO_PAGE: u64 = 3;

/// Where the kernel has what is read here. Numbers of words into `struct page`, and offsets in bytes.
struct Layout {
    descriptors: Descriptors,
    file_mapping: u64,
    root: u64,
    flags: usize,
    head: u64,
    folio: usize,
    mapping: usize,
    index: usize,
    counts: usize,
}

impl Layout {
    /// None also where the kernel's structures are not what this file takes them for.
    fn find(btf: &Btf<'_>) -> Option<Self> {
        let word = |of, field| {
            let at = btf.offset(of, field).filter(|at| at % 8 == 0)?;
            usize::try_from(at / 8).ok().filter(|word| *word < DESCRIPTION_WORDS)
        };
        let one_word = btf.offset("folio", "_refcount")? == btf.offset("folio", "_mapcount")? + 4;
        (btf.size("page")? == DESCRIPTION_BYTES as u64 && one_word).then_some(())?;
        Some(Self {
            descriptors: Descriptors::find(btf)?,
            file_mapping: btf.offset("file", "f_mapping")?,
            root: btf.offset("address_space", "i_pages")? + btf.offset("xarray", "xa_head")?,
            flags: word("folio", "flags")?,
            head: 1_u64.checked_shl(btf.constant("pageflags", "PG_head")?)?,
            folio: word("page", "compound_head")?,
            mapping: word("folio", "mapping")?,
            index: word("folio", "index")?,
            counts: word("folio", "_mapcount")?,
        })
    }
}

/// A file's pages, as the kernel knows them (`struct address_space`): the same for all descriptors and mappings of the file,
/// and of no other file for as long as one of them is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FilePages(u64);

/// Small pages of a file without a name that are there, and mapped here: by them it is found out how the kernel keeps such pages.
struct Sample {
    file: File,
    window: Window,
}

impl Sample {
    fn new(pages: usize) -> io::Result<Self> {
        let file = File::from(memfd_create(c"spillway-pages", MemfdFlags::CLOEXEC)?);
        file.set_len((pages * PAGE_BYTES) as u64)?;
        Self::of(file, pages)
    }

    fn of(file: File, pages: usize) -> io::Result<Self> {
        let window = Window::of(&file, pages as u64)?;
        window.populate(window.span())?;
        Ok(Self { file, window })
    }

    fn pages(&self) -> u64 {
        self.window.span().pages()
    }

    fn address(&self, page: u64) -> Address {
        self.window.span().start.plus_pages(page)
    }
}

impl AsFd for Sample {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// What can be seen of pins.
pub struct Pins {
    memory: KernelMemory,
    layout: Layout,
    /// Where the array of all pages begins (`vmemmap`).
    array: u64,
}

impl Pins {
    /// Finds out how pages are described.
    ///
    /// # Errors
    /// Without the rights to it (`CAP_BPF`, `CAP_PERFMON`, `CAP_SYS_ADMIN`), on a kernel that does not let or does not
    /// describe itself, or has other structures. Unsupported when pages are not described as they are; once in a long while
    /// because one of them was moved just then, so it may be tried again.
    pub fn open() -> io::Result<Self> {
        let mut pins = Self { memory: KernelMemory::open()?, layout: btf::of_kernel(Layout::find)?, array: 0 };
        // The only page of a file, if it is the first, is what the file's tree has in place of a root.
        let first = Sample::new(1)?;
        let pages = pins.pages_of(first.as_fd())?;
        let page = pins.memory.word(pages.0.wrapping_add(pins.layout.root))?;
        let before = frame_of(first.address(0))?.checked_mul(DESCRIPTION_BYTES as u64);
        let array = before.and_then(|before| page.checked_sub(before)).filter(|_| page & NO_PAGE == 0);
        pins.array = array.ok_or(io::ErrorKind::Unsupported)?;
        pins.verify(&first)?;
        pins.verify(&Sample::new(SAMPLE_PAGES)?)?;
        Ok(pins)
    }

    /// That pages are described as they are: of that file, each at its place, and mapped once.
    fn verify(&mut self, sample: &Sample) -> io::Result<()> {
        let pages = self.pages_of(sample.as_fd())?;
        for index in 0..sample.pages() {
            let counts = self.counts(frame_of(sample.address(index))?, pages, index)?;
            // More references than two are of CPUs, one or two of each.
            counts
                .filter(|(mappings, held)| *mappings == 1 && (2..16).contains(held))
                .ok_or(io::ErrorKind::Unsupported)?;
        }
        Ok(())
    }

    /// The pages of the file that a descriptor of ours names; for memory without a file, `/proc/PID/map_files` has one.
    ///
    /// # Errors
    /// When the kernel's memory cannot be read.
    pub fn pages_of(&mut self, file: BorrowedFd<'_>) -> io::Result<FilePages> {
        let file = self.layout.descriptors.file(&mut self.memory, file)?;
        self.memory.follow(file, &[self.layout.file_mapping]).map(FilePages)
    }

    /// Whether the page in this frame is, or may be, held by more than its file and its mappings; it is to be the page of
    /// `pages` with this index (its offset in the file, in pages). True as well if it is not, or part of a large folio.
    ///
    /// # Errors
    /// When there is no such frame: then it is not known, which is to be taken for pinned.
    pub fn is_pinned(&mut self, frame: u64, pages: FilePages, index: u64) -> io::Result<bool> {
        let counts = self.counts(frame, pages, index)?;
        Ok(counts.is_none_or(|(mappings, references)| references != mappings + 1))
    }

    /// Has all CPUs let go of pages that they hold for a while: what is pinned afterwards is so for another reason.
    ///
    /// # Errors
    /// ENOSYS on a kernel that knows but one node of memory (without `CONFIG_NUMA`).
    pub fn settle(&self) -> io::Result<()> {
        settle_pages()
    }

    /// Mappings of the page in this frame, and references to it; none if it is not this page, or part of a large folio.
    fn counts(&mut self, frame: u64, pages: FilePages, index: u64) -> io::Result<Option<(u64, u64)>> {
        let at = self.array.wrapping_add(frame.wrapping_mul(DESCRIPTION_BYTES as u64));
        let mut words = [0; DESCRIPTION_WORDS];
        for (word, bytes) in words.iter_mut().zip(self.memory.read(at, DESCRIPTION_BYTES)?.as_chunks().0) {
            *word = u64::from_ne_bytes(*bytes);
        }
        let layout = &self.layout;
        let is_it = words[layout.mapping] == pages.0 && words[layout.index] == index;
        let large = words[layout.folio] & TAIL != 0 || words[layout.flags] & layout.head != 0;
        let counts = words[layout.counts];
        // `_mapcount` begins at -1.
        let (mappings, references) = (counts.wrapping_add(1) & u64::from(u32::MAX), counts >> 32);
        Ok((is_it && !large).then_some((mappings, references)))
    }
}

#[cfg(test)]
mod tests {
    use crate::skipped::skipped;
    use std::cell::RefCell;
    use std::io::Read;
    use std::os::unix::fs::FileExt;

    use super::*;
    use crate::sys::test::{comes_true, pipe_of_page, ring_of_page};

    struct Bench(RefCell<Pins>);

    impl Bench {
        fn open() -> Option<Self> {
            let pins = Pins::open().and_then(|pins| pins.settle().map(|()| pins));
            let pins = pins.inspect_err(|error| skipped(format_args!("pins cannot be read here: {error}")));
            pins.ok().map(RefCell::new).map(Self)
        }

        /// Whether a page is pinned when no CPU holds it any more.
        fn is_pinned(&self, of: &Sample, page: u64) -> bool {
            let mut pins = self.0.borrow_mut();
            pins.settle().expect("it has worked");
            let frame = frame_of(of.address(page)).expect("mapped");
            let pages = pins.pages_of(of.as_fd()).expect("open");
            pins.is_pinned(frame, pages, page).expect("a frame")
        }

        /// Something else may hold a page for a moment.
        fn gets_free(&self, of: &Sample, page: u64) -> bool {
            comes_true(|| !self.is_pinned(of, page))
        }
    }

    #[test]
    fn a_page_is_free_however_often_it_is_mapped() {
        let Some(bench) = Bench::open() else { return };
        let file = Sample::new(2).expect("memory");
        assert!(bench.gets_free(&file, 0) && bench.gets_free(&file, 1));
        let again = Sample::of(file.file.try_clone().expect("a descriptor"), 2).expect("memory");
        assert!(bench.gets_free(&file, 1) && bench.gets_free(&again, 1));
        drop(file);
        assert!(bench.gets_free(&again, 1));
        // Of pages that are used by system calls a CPU holds some for a while, but not until it is told to let go.
        let file = Sample::new(2).expect("memory");
        let used = File::from(file.as_fd().try_clone_to_owned().expect("a descriptor"));
        (0..4).for_each(|_| used.read_exact_at(&mut [0], 4096).expect("it is there"));
        assert!((0..20).any(|_| !bench.is_pinned(&file, 1)));
    }

    #[test]
    fn a_page_in_a_pipe_is_pinned_until_it_is_read() {
        let Some(bench) = Bench::open() else { return };
        let file = Sample::new(2).expect("memory");
        let (mut reader, writer) = pipe_of_page(file.address(1)).expect("a pipe");
        assert!(bench.gets_free(&file, 0) && bench.is_pinned(&file, 1));
        reader.read_exact(&mut [0; 4096]).expect("it is there");
        assert!(bench.gets_free(&file, 1));
        let pipe = pipe_of_page(file.address(1)).expect("a pipe");
        assert!(bench.is_pinned(&file, 1));
        drop((pipe, writer));
        assert!(bench.gets_free(&file, 1));
    }

    #[test]
    fn a_page_of_a_ring_is_pinned_until_it_is_closed() {
        let Some(bench) = Bench::open() else { return };
        let file = Sample::new(1).expect("memory");
        match ring_of_page(file.address(0)) {
            Ok(_ring) => assert!(bench.is_pinned(&file, 0)),
            Err(error) => skipped(format_args!("io_uring is not to be had: {error}")),
        }
        assert!(bench.gets_free(&file, 0));
    }

    #[test]
    fn what_is_not_the_page_asked_for_is_pinned() {
        let Some(bench) = Bench::open() else { return };
        let (file, other) = (Sample::new(2).expect("memory"), Sample::new(2).expect("memory"));
        assert!(bench.gets_free(&file, 1) && bench.gets_free(&other, 1));
        let frame = frame_of(file.address(1)).expect("mapped");
        let mut pins = bench.0.borrow_mut();
        let [own, others] = [&file, &other].map(|file| pins.pages_of(file.as_fd()).expect("open"));
        let mut answer = |frame, pages, index| pins.is_pinned(frame, pages, index).ok();
        assert_eq!(
            [answer(frame, own, 1), answer(frame, own, 0), answer(frame, others, 1)],
            [false, true, true].map(Some)
        );
        assert_eq!(answer(1 << 50, own, 1), None);
    }
}
