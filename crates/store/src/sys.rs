//! The room for unsafe code: io_uring on page-sized buffers, memory that is lent to another thread, and memory
//! that outlives this process.
#![allow(unsafe_code)]

pub(crate) mod memory;
pub(crate) mod shared;

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use io_uring::{IoUring, opcode, types};
use memmap2::MmapMut;
use spillway_core::{PAGE_BYTES, Page};

/// Reads and writes of whole pages of one file, under way by buffer.
///
/// Invariant: while `busy[n]`, the kernel may use buffer `n` and nobody else does. The ring and the file are dropped only
/// when no buffer is busy, before the buffers.
pub(crate) struct PageRing {
    ring: IoUring,
    file: File,
    busy: Vec<bool>,
    buffers: MmapMut,
}

/// What is done with a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Transfer {
    Read,
    Write,
}

impl PageRing {
    /// For so many transfers at a time.
    pub(crate) fn new(file: File, buffers: u16) -> io::Result<Self> {
        let ring = IoUring::new(u32::from(buffers))?;
        let memory = MmapMut::map_anon(usize::from(buffers) * PAGE_BYTES)?;
        Ok(Self { ring, file, busy: vec![false; usize::from(buffers)], buffers: memory })
    }

    /// Readable when a transfer has ended.
    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        // SAFETY: the ring owns the descriptor and lives as long as `self` is borrowed.
        unsafe { BorrowedFd::borrow_raw(self.ring.as_raw_fd()) }
    }

    /// A buffer that no transfer uses.
    pub(crate) fn buffer(&mut self, buffer: u16) -> &mut Page {
        let buffer = usize::from(buffer);
        assert!(!self.busy[buffer], "the kernel uses buffer {buffer}");
        let start = buffer * PAGE_BYTES;
        (&mut self.buffers[start..start + PAGE_BYTES]).try_into().expect("a page")
    }

    /// What a write under way reads from: nobody changes it.
    pub(crate) fn written(&self, buffer: u16) -> &Page {
        let start = usize::from(buffer) * PAGE_BYTES;
        (&self.buffers[start..start + PAGE_BYTES]).try_into().expect("a page")
    }

    /// Queues a transfer between a buffer and the file's page `at`.
    pub(crate) fn queue(&mut self, transfer: Transfer, buffer: u16, at: u64) {
        let address = self.buffer(buffer).as_mut_ptr();
        let file = types::Fd(self.file.as_fd().as_raw_fd());
        let (bytes, offset) = (PAGE_BYTES.try_into().expect("fits"), at * PAGE_BYTES as u64);
        let entry = match transfer {
            Transfer::Read => opcode::Read::new(file, address, bytes).offset(offset).build(),
            Transfer::Write => opcode::Write::new(file, address, bytes).offset(offset).build(),
        };
        self.busy[usize::from(buffer)] = true;
        // SAFETY: the buffer is part of a mapping that outlives the transfer, is page-sized, and is not touched while
        // it is marked busy (a write's may be read); the file is open as long as the ring.
        let queued = unsafe { self.ring.submission().push(&entry.user_data(u64::from(buffer))) };
        queued.expect("there are as many entries as buffers, and each has one transfer at most");
    }

    /// Hands what is queued to the kernel.
    pub(crate) fn submit(&mut self) {
        if !self.ring.submission().is_empty() {
            // What it does not take for now stays queued.
            let _ = self.ring.submit();
        }
    }

    /// A transfer that has ended: its buffer, and bytes transferred or why not.
    pub(crate) fn ended(&mut self) -> Option<(u16, io::Result<u32>)> {
        let entry = self.ring.completion().next()?;
        let buffer = u16::try_from(entry.user_data()).expect("as it was queued");
        self.busy[usize::from(buffer)] = false;
        let result = entry.result();
        Some((buffer, u32::try_from(result).map_err(|_| io::Error::from_raw_os_error(-result))))
    }
}

impl Drop for PageRing {
    fn drop(&mut self) {
        while self.busy.contains(&true) {
            if self.ring.submit_and_wait(1).is_err_and(|error| error.kind() != io::ErrorKind::Interrupted) {
                // The kernel may still write into the buffers: they must stay.
                let buffers = std::mem::replace(&mut self.buffers, MmapMut::map_anon(PAGE_BYTES).expect("a page"));
                std::mem::forget(buffers);
                return;
            }
            while self.ended().is_some() {}
        }
    }
}
