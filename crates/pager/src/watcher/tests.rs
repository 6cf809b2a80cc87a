//! What is answered when those who were served have ended, and that all is brought home where CPUs are busy.

use crate::skipped::skipped;
use std::sync::mpsc::channel;
use std::time::Duration;

use super::*;
use crate::driver::Homeward;
use crate::sys::uffd::new_of_our_own;

const PATIENCE: Duration = Duration::from_secs(2);

/// One that has seen nobody. The fault thread's part is to tell of `forked` children, and then that it has told of all. In the idle class
/// it brings nothing home until it is rescued, or `PATIENCE` is over.
pub(super) fn watcher_of(forked: Vec<Report>) -> Watcher {
    let ((commands, orders), (requests, inbox)) = (channel(), channel());
    let bell = Arc::new(Bell::new().expect("a descriptor"));
    let (local, choice) = (Local::All, Choice::default());
    let (shared, managed, trees, first): (Arc<Shared>, _, _, _) = Default::default();
    let told = Arc::clone(&shared);
    std::thread::spawn(move || {
        let mut forked = Some(forked);
        for command in orders {
            if let Command::Answer { reply } = command {
                let reports = forked.take().into_iter().flatten().map(Request::Report);
                reports.for_each(|report| requests.send(report).expect("it is heard"));
                reply.send(()).expect("it is waited for");
            } else if let Command::Release { reply } = command {
                let began = Instant::now();
                while told.idle_forbidden_until_ns.load(Relaxed) == 0 && began.elapsed() < PATIENCE {
                    std::thread::sleep(Duration::from_millis(1));
                }
                reply.send(Homeward::Done(Vec::new())).expect("it is waited for");
            }
        }
    });
    Watcher::new(
        None,
        OnPagerDeath::HoldTarget,
        local,
        choice,
        commands,
        bell,
        inbox,
        None,
        shared,
        managed,
        trees,
        first,
    )
}

fn is_anyone_left(watcher: &mut Watcher) -> bool {
    let (reply, answer) = channel();
    watcher.answer(Request::IsAnyoneLeft(reply));
    answer.try_recv().expect("it is answered")
}

#[test]
fn a_fork_that_was_read_is_heard_of_before_nobody_is_left() {
    let uffd = match new_of_our_own() {
        Ok(uffd) => uffd,
        Err(error) => return skipped(error),
    };
    let (parent, child, tally) = (None, TargetId(1), Arc::<Tally>::default());
    let forked = Report::Forked { parent, child, uffd, tally, has_known_views: true, taken_over: None };
    assert!(is_anyone_left(&mut watcher_of(vec![forked])));
}

#[test]
fn who_comes_when_nobody_is_left_is_refused() {
    let mut watcher = watcher_of(Vec::new());
    let adopt = |watcher: &mut Watcher| {
        let (reply, answer) = channel();
        watcher.answer(Request::Adopt { tally: Arc::default(), at_once: false, reply });
        answer.try_recv().expect("it is answered")
    };
    assert!(adopt(&mut watcher).is_ok());
    watcher.roots.clear();
    assert!(!is_anyone_left(&mut watcher));
    assert!(matches!(adopt(&mut watcher), Err(Error::Ending)));
    assert!(watcher.roots.is_empty());
}

/// Beside busy programs a pager that was told to end brought three pages in a thousand of its time home.
#[test]
fn a_fault_thread_that_starves_while_it_brings_all_home_is_rescued() {
    let mut watcher = watcher_of(Vec::new());
    watcher.shared.idle.store(true, Relaxed);
    watcher.shared.crowded.store(true, Relaxed);
    let (reply, answer) = channel();
    let began = Instant::now();
    watcher.answer(Request::Release(reply));
    assert!(matches!(answer.try_recv(), Ok(Departure::Done(Ok(())))));
    assert!(began.elapsed() < PATIENCE, "nobody looked after it");
}
