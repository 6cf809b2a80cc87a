//! Stores against real servers, files, and servers that lie. In one program, as most tests wait for a server: many do at the same time.

mod common;
mod contract;
mod drain;
mod file;
mod liars;
mod network;
mod order;
mod stripes;
mod tcp;
mod tls;
