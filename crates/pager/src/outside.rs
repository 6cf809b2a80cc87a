//! Whether a thread has been outside of a system call since: of a removal that was announced, of a fork that may have begun before its
//! memory was registered. Neither sleeps but where nothing can wake it.

use std::sync::Arc;

use crate::procfs::{self, Stat};

/// CPU time in user mode, in clock ticks, after which a running thread has certainly left a removal. One tick less may be how the kernel
/// rounds, which divides a thread's time by samples.
const TICKS_OUTSIDE: u64 = 3;

/// What a thread of a process had had of the CPU: in user mode, where that cannot be said of removals however large. The kernel's own
/// threads have none; those that may be at a removal (io_uring's) do nothing else for long.
pub(crate) struct Ticks {
    pid: i32,
    thread: i32,
    ticks: u64,
}

impl Ticks {
    /// Of all threads of these processes, each named by any of its own; none where we could not ask.
    pub(crate) fn of_all(named: &[i32]) -> Option<Arc<[Self]>> {
        let processes = named.iter().map(|&thread| procfs::process_of(thread).ok());
        let mut pids: Vec<i32> = processes.collect::<Option<Vec<_>>>()?.into_iter().flatten().collect();
        pids.sort_unstable();
        pids.dedup();
        let all = pids.into_iter().map(Self::of).collect::<Option<Vec<_>>>();
        all.map(|all| all.into_iter().flatten().collect())
    }

    /// Of all threads of a process; none where we could not ask.
    pub(crate) fn of(pid: i32) -> Option<Vec<Self>> {
        let threads = procfs::if_asked(procfs::threads(pid)).ok()?.unwrap_or_default();
        let all = threads.into_iter().map(|thread| {
            let stat = procfs::if_asked(procfs::thread_stat(pid, thread)).ok()?;
            Some(stat.map(|stat| Self { pid, thread, ticks: Self::counted(&stat) }))
        });
        all.collect::<Option<Vec<_>>>().map(|all| all.into_iter().flatten().collect())
    }

    fn counted(stat: &Stat) -> u64 {
        if stat.is_kernels { stat.kernel_ticks } else { stat.user_ticks }
    }

    /// Whether it is asleep now, has ended, or has run for long since.
    pub(crate) fn is_outside(&self) -> bool {
        match procfs::thread_stat(self.pid, self.thread) {
            Ok(stat) => !matches!(stat.state, b'R' | b'D') || Self::counted(&stat) >= self.ticks + TICKS_OUTSIDE,
            Err(error) => !procfs::is_for_want_of(&error),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::time::Duration;

    use super::*;

    /// Waits, for a while, until a process is asleep.
    pub(crate) fn until_asleep(pid: i32) {
        let is_asleep = || procfs::stat(pid).is_ok_and(|stat| stat.state == b'S');
        (0..1000).take_while(|_| !is_asleep()).for_each(|_| std::thread::sleep(Duration::from_millis(1)));
    }

    /// A removal takes as long as it takes, all of it in the kernel: one of many gigabytes was believed to be over before it was.
    #[test]
    fn who_runs_in_the_kernel_alone_may_be_at_a_removal_still() {
        let mut reads_zeros = std::process::Command::new("dd");
        let quiet = std::process::Stdio::null;
        let reads_zeros =
            reads_zeros.args(["if=/dev/zero", "of=/dev/null", "bs=64M"]).stdout(quiet()).stderr(quiet()).spawn();
        let mut spins = std::process::Command::new("sh");
        let spins = spins.args(["-c", "while :; do :; done"]).spawn();
        let mut both = [reads_zeros, spins].map(|child| child.expect("it is everywhere"));
        let [in_the_kernel, in_user_mode] = [&both[0], &both[1]].map(|child| child.id().cast_signed());
        let all_of = |pid: i32, field: fn(&Stat) -> u64| procfs::stat(pid).map_or(0, |stat| field(&stat));
        let wait = |pid, field: fn(&Stat) -> u64| {
            let from = all_of(pid, field);
            let has_had = || all_of(pid, field) >= from + 4 * TICKS_OUTSIDE;
            (0..10_000).take_while(|_| !has_had()).for_each(|_| std::thread::sleep(Duration::from_millis(1)));
            has_had()
        };
        let has_begun = wait(in_the_kernel, |stat| stat.kernel_ticks);
        let [in_the_kernel_before, in_user_mode_before] =
            [in_the_kernel, in_user_mode].map(|pid| Ticks::of(pid).expect("we may ask"));
        let has_run = wait(in_the_kernel, |stat| stat.kernel_ticks) && wait(in_user_mode, |stat| stat.user_ticks);
        let at_it = in_the_kernel_before.iter().all(Ticks::is_outside);
        let outside = in_user_mode_before.iter().all(Ticks::is_outside);
        both.iter_mut().for_each(|child| child.kill().and_then(|()| child.wait().map(drop)).expect("it ends"));
        assert!(has_begun && has_run);
        assert!(!at_it, "who runs in the kernel was taken to be outside");
        assert!(outside, "who runs in user mode was not");
    }
}
