//! Access bits: which pages a target has touched, read from its page tables.
//!
//! The processor sets a bit in the page table when it goes through an entry. The kernel shows these bits to nobody (idle page
//! tracking and the like are compiled out of many kernels), but lets whoever may trace it look at its memory (BPF): a target's
//! page table is found by way of our own descriptor of its `pagemap`, and read a table at a time. `MADV_COLD` clears the bits.
//!
//! Nothing depends on what is read but the choice of victims: page tables change while they are read, and may be gone.

use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use spillway_core::touches::{AccessBits, Touches, block_of};
use spillway_core::{Address, PAGE_BYTES_U64, Span, TargetId};

use crate::btf;
use crate::kernel_file::Descriptors;
use crate::sys::bpf::{KernelMemory, READ_BYTES};
use crate::sys::pagemap::{Pagemap, frame_of};
use crate::sys::process::{forget_touches, pidfd_of_process};

const PRESENT: u64 = 1;
const ACCESSED: u64 = 1 << 5;
/// The entry is of a huge page, and names no table.
const HUGE: u64 = 1 << 7;
/// Where the next table is, or the page.
const FRAME: u64 = 0x000F_FFFF_FFFF_F000;

/// The alignment of where the kernel has all memory mapped (`kernel_randomize_memory`).
const BASE_STEP: u64 = 1 << 30;
/// How far below any of it that can begin.
const BASE_STEPS_MAX: u64 = 1 << 14;

/// Offsets in bytes into the kernel's structures.
struct Offsets {
    descriptors: Descriptors,
    private: u64,
    pages: u64,
}

impl Offsets {
    fn find() -> io::Result<Self> {
        btf::of_kernel(|btf| {
            Some(Self {
                descriptors: Descriptors::find(btf)?,
                private: btf.offset("file", "private_data")?,
                pages: btf.offset("mm_struct", "pgd")?,
            })
        })
    }
}

/// How a target's page tables are found.
struct Tables {
    root: u64,
    process: OwnedFd,
    /// Keeps what `root` points to: the address space's own description, if not what is in it.
    _pagemap: Pagemap,
}

/// What can be seen of access bits.
pub struct Access {
    memory: KernelMemory,
    offsets: Offsets,
    /// Where the kernel has all memory mapped.
    base: u64,
    levels: u32,
    targets: Vec<Option<Tables>>,
}

impl Access {
    /// Finds out how page tables can be read.
    ///
    /// # Errors
    /// Without the rights to it (`CAP_BPF` and `CAP_PERFMON`), or on a kernel that does not let or does not describe itself.
    pub fn open() -> io::Result<Self> {
        let levels = if fs::read_to_string("/proc/cpuinfo")?.contains(" la57") { 5 } else { 4 };
        let mut access =
            Self { memory: KernelMemory::open()?, offsets: Offsets::find()?, base: 0, levels, targets: Vec::new() };
        access.base = access.find_base()?;
        Ok(access)
    }

    /// Looks for a page of ours in the kernel's mapping of all memory.
    fn find_base(&mut self) -> io::Result<u64> {
        let root = self.root(&Pagemap::open(std::process::id().cast_signed())?)?;
        let mut page = vec![0_u64; 2 * READ_BYTES / 8];
        let at = page.as_ptr() as u64;
        let word = (PAGE_BYTES_U64 - at % PAGE_BYTES_U64) / 8;
        let index = usize::try_from(word).unwrap_or(0);
        // Nothing else has both of these.
        page[index] = at.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        page[index + 1] = !page[index];
        let frame = frame_of(Address(at + 8 * word))?;
        let candidates = (0..BASE_STEPS_MAX).map(|step| (root & !(BASE_STEP - 1)).saturating_sub(step * BASE_STEP));
        let is_it = |base: &u64| {
            let there = base.saturating_add(frame * PAGE_BYTES_U64);
            [0, 1].iter().all(|&i| self.memory.word(there + 8 * i as u64).is_ok_and(|word| word == page[index + i]))
        };
        candidates
            .into_iter()
            .take_while(|&base| base >> 63 == 1)
            .find(is_it)
            .ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    /// Where the page table of a process begins, by what `file->private_data` of our descriptor points to.
    fn root(&mut self, pagemap: &Pagemap) -> io::Result<u64> {
        let file = self.offsets.descriptors.file(&mut self.memory, pagemap.as_fd())?;
        self.memory.follow(file, &[self.offsets.private, self.offsets.pages])
    }

    /// From now on the memory of `target` is that of `pid`.
    ///
    /// # Errors
    /// When it is gone, or not ours to look at.
    pub fn add(&mut self, target: TargetId, pid: i32) -> io::Result<()> {
        let pagemap = Pagemap::open(pid)?;
        let tables = Tables { root: self.root(&pagemap)?, process: pidfd_of_process(pid)?, _pagemap: pagemap };
        let at = target.0 as usize;
        if self.targets.len() <= at {
            self.targets.resize_with(at + 1, || None);
        }
        self.targets[at] = Some(tables);
        Ok(())
    }

    /// Forgets `target`.
    pub fn remove(&mut self, target: TargetId) {
        if let Some(tables) = self.targets.get_mut(target.0 as usize) {
            *tables = None;
        }
    }

    /// The access bits of the 2 MiB at `start`.
    fn look(&mut self, root: u64, start: Address) -> io::Result<Touches> {
        let mut table = root;
        for level in (1..self.levels).rev() {
            let entry = self.memory.word(table + 8 * (start.0 >> (12 + 9 * level) & 511))?;
            if entry & PRESENT == 0 {
                return Ok([0; 8]);
            }
            if entry & HUGE != 0 {
                return Ok([if entry & ACCESSED == 0 { 0 } else { u64::MAX }; 8]);
            }
            table = self.base.wrapping_add(entry & FRAME);
        }
        let entries = self.memory.read(table, READ_BYTES)?;
        let mut touches = [0; 8];
        for (at, entry) in entries.as_chunks().0.iter().enumerate() {
            let touched = u64::from_ne_bytes(*entry) & (PRESENT | ACCESSED) == PRESENT | ACCESSED;
            touches[at / 64] |= u64::from(touched) << (at % 64);
        }
        Ok(touches)
    }
}

impl AccessBits for Access {
    fn take(&mut self, target: TargetId, span: Span) -> Option<Touches> {
        let root = self.targets.get(target.0 as usize)?.as_ref()?.root;
        let touches = self.look(root, block_of(span.start).start).ok()?;
        if touches == [0; 8] {
            return Some(touches);
        }
        let process = self.targets[target.0 as usize].as_ref()?.process.as_fd();
        // What cannot be cleared says nothing the next time.
        forget_touches(process, span).ok().map(|()| touches)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::skipped::skipped;
    use crate::sys::test::Aligned;

    #[test]
    fn what_is_touched_shows_until_it_is_taken() {
        let mut access = match Access::open() {
            Ok(access) => access,
            Err(error) => {
                skipped(format_args!("access bits cannot be read here: {error}"));
                return;
            }
        };
        let mut memory = Aligned::blocks(2);
        let (target, own) = (TargetId(3), std::process::id().cast_signed());
        access.add(target, own).expect("our own");
        let block = block_of(Address(memory.page(0).as_ptr() as u64)).start;
        let first = Span::of_pages(block, 512);
        let second = Span::of_pages(first.end, 512);
        for page in 0..512 + 100 {
            memory.page(page)[0] = 1;
        }
        assert_eq!(access.take(target, first), Some([u64::MAX; 8]));
        assert_eq!(access.take(target, first), Some([0; 8]));
        let upto_100 = [u64::MAX, (1 << 36) - 1, 0, 0, 0, 0, 0, 0];
        assert_eq!(access.take(target, second), Some(upto_100));
        std::hint::black_box(memory.page(70)[5]);
        memory.page(511)[5] = 2;
        let mut expected = [0; 8];
        (expected[1], expected[7]) = (1 << 6, 1 << 63);
        assert_eq!(access.take(target, first), Some(expected));
        // Of another target, and of one that is forgotten, nothing is known.
        assert_eq!(access.take(TargetId(1), first), None);
        access.remove(target);
        assert_eq!(access.take(target, first), None);
    }
}
