//! Our own descriptors as the kernel has them: the way from the task that runs to what a descriptor names.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use crate::btf::Btf;
use crate::sys::bpf::KernelMemory;

/// Offsets in bytes on the way there.
pub struct Descriptors {
    files: u64,
    table: u64,
    descriptors: u64,
}

impl Descriptors {
    /// What the kernel says of its structures; none where it knows none of these.
    pub fn find(btf: &Btf<'_>) -> Option<Self> {
        Some(Self {
            files: btf.offset("task_struct", "files")?,
            table: btf.offset("files_struct", "fdt")?,
            descriptors: btf.offset("fdtable", "fd")?,
        })
    }

    /// The kernel's address of what `fd` names (`struct file`). It lasts as long as the descriptor.
    ///
    /// # Errors
    /// As [`KernelMemory::read`]. Where another thread's descriptors make the table move just then, the answer may be wrong.
    pub fn file(&self, memory: &mut KernelMemory, fd: BorrowedFd<'_>) -> io::Result<u64> {
        let number = u64::from(fd.as_raw_fd().cast_unsigned());
        let task = memory.current_task()?;
        memory.follow(task, &[self.files, self.table, self.descriptors, 8 * number])
    }
}
