//! What the pager's threads together weigh, where the kernel shares CPUs out by session first (`autogroup`, sched(7)).
//!
//! `SCHED_IDLE` counts only among the threads of one session. The pager has one of its own: between it and a program the kernel
//! decides by what the two sessions weigh on that CPU, which for the pager's depends on where its other threads ran of late. Where it
//! weighs as much as the program's, whom a fault thread in the idle class wakes on its own CPU is not let run before that one sleeps. So
//! the session weighs little for as long as the fault thread is in the idle class (docs/decisions/0002).

use std::fs;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use crate::procfs;

/// The kernel's nicenesses of a session that counts for as little as it can, 15 where 1024 is usual, and of one as any other.
const LIGHT: &str = "19";
const USUAL: &str = "0";

static IS_LIGHT: AtomicBool = AtomicBool::new(false);

fn set(niceness: &str) -> bool {
    fs::write("/proc/self/autogroup", niceness).is_ok()
}

/// The session that this process leads, if what it weighs can be changed as often as there is cause to: without `CAP_SYS_ADMIN` the
/// kernel allows it ten times a second. Asked once.
fn ours() -> Option<i32> {
    static OURS: OnceLock<Option<i32>> = OnceLock::new();
    *OURS.get_or_init(|| {
        let us = std::process::id().cast_signed();
        let leads = procfs::stat(us).is_ok_and(|stat| stat.session == us);
        (leads && set(USUAL) && set(USUAL)).then_some(us)
    })
}

/// Lets the pager's session count for little beside `theirs`, that of a program whose threads are to go first; or, for none, for as
/// much as any. Nothing changes where that is the pager's own, or is not the pager's to change.
pub fn give_way_to(theirs: Option<i32>) {
    let light = theirs.is_some_and(|theirs| ours().is_some_and(|ours| ours != theirs));
    if IS_LIGHT.load(Relaxed) != light && set(if light { LIGHT } else { USUAL }) {
        IS_LIGHT.store(light, Relaxed);
    }
}
