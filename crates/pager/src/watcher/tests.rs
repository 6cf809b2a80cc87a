//! What is answered when those who were served have ended.

use crate::skipped::skipped;
use std::sync::mpsc::channel;

use super::*;
use crate::sys::uffd::new_of_our_own;

/// One that has seen nobody. The fault thread's part is to tell of `forked` children, and then that it has told of all.
fn watcher_of(forked: Vec<Report>) -> Watcher {
    let ((commands, orders), (requests, inbox)) = (channel(), channel());
    let bell = Arc::new(Bell::new().expect("a descriptor"));
    let (local, choice) = (Local::All, Choice::default());
    std::thread::spawn(move || {
        let mut forked = Some(forked);
        for command in orders {
            if let Command::Answer { reply } = command {
                let reports = forked.take().into_iter().flatten().map(Request::Report);
                reports.for_each(|report| requests.send(report).expect("it is heard"));
                reply.send(()).expect("it is waited for");
            }
        }
    });
    let (shared, managed, trees, first) = Default::default();
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
