//! The unsafe rooms: system calls, kernel structures, and memory shared with a target.
//!
//! Each wrapper is safe to call with any argument: what the kernel refuses comes back as an error.

pub mod agent;
pub mod bpf;
pub mod clock;
pub mod detour;
pub mod epoll;
pub mod fd;
pub mod message;
pub mod pagemap;
pub mod process;
pub mod procmap;
pub mod ptrace;
pub mod rseq;
pub mod sched;
pub mod sequence;
#[cfg(test)]
pub mod test;
pub mod twin;
pub mod uffd;
pub mod window;
