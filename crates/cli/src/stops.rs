//! Keeps the front and the target stopped or running together, as if they were one process.
//!
//! The front stops itself when the target stops; a stopped front cannot see what happens next, so the pager looks.
//! Invariant: the front announces its own stops, so a stop that was not announced came from outside and is meant for
//! the program.

use crate::{processes, sys};

/// What the pager does about the two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mend {
    Nothing,
    /// The target goes on or has ended: the shell must hear of it from the front.
    ContinueFront,
    /// Somebody stopped the front: the program stops.
    StopTarget,
}

/// Looks at both once. `announced`: the front stopped itself because the target had stopped.
pub(crate) fn mend(front: i32, target: i32, announced: bool) {
    if target == 0 || !stopped(processes::state(front)) {
        return;
    }
    match judge(announced, stopped(processes::state(target))) {
        Mend::Nothing => {}
        Mend::ContinueFront => sys::send(front, libc::SIGCONT),
        Mend::StopTarget => sys::send(target, libc::SIGSTOP),
    }
}

fn judge(announced: bool, target_stopped: bool) -> Mend {
    match (announced, target_stopped) {
        (_, true) => Mend::Nothing,
        (true, false) => Mend::ContinueFront,
        (false, false) => Mend::StopTarget,
    }
}

/// By a signal, or for a moment by a tracer.
pub(crate) fn stopped(state: Option<char>) -> bool {
    matches!(state, Some('T' | 't'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stopped_front_follows_or_leads() {
        assert_eq!(judge(true, true), Mend::Nothing);
        assert_eq!(judge(false, true), Mend::Nothing);
        assert_eq!(judge(true, false), Mend::ContinueFront);
        assert_eq!(judge(false, false), Mend::StopTarget);
    }
}
