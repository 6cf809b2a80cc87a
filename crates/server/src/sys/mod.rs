//! The only unsafe code of the memory server: mapped memory, the pages in it, and epoll.

pub(crate) mod epoll;
pub(crate) mod grains;
mod mapping;
pub(crate) mod pages;
mod stream;
