//! The life of a page: whatever happens to it in whatever order, what it holds is given back exactly once.

use std::collections::BTreeSet;

use proptest::prelude::*;
use spillway_core::page::{BufferIndex, Entry, HandleBits, State, Step};

fn step() -> impl Strategy<Value = usize> {
    0..15_usize
}

/// The step of that number; captures and writes name a buffer and a handle that nothing else does.
fn nth(step: usize, fresh: u32) -> Step {
    let handle = HandleBits::new(fresh).expect("counts from one");
    [
        Step::Fill,
        Step::Find,
        Step::Capture(BufferIndex(fresh)),
        Step::ReadZero,
        Step::Refault,
        Step::Write,
        Step::Written(handle),
        Step::Keep,
        Step::Fetch,
        Step::Install,
        Step::PutBack,
        Step::Lose,
        Step::Remove,
        Step::RemoveDone,
        Step::RemoveSpared,
    ][step]
}

proptest! {
    // The smallest input that fails is printed; nothing is written beside the sources.
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn what_a_page_holds_is_given_back_once(steps in prop::collection::vec((step(), any::<bool>()), 1..300)) {
        let mut entry = Entry::UNTOUCHED;
        let (mut buffers, mut handles) = (BTreeSet::new(), BTreeSet::new());
        for (fresh, (step, mark)) in (1_u32..).zip(steps) {
            let (before, step) = (entry, nth(step, fresh));
            let Ok(released) = entry.step(step) else {
                prop_assert_eq!(entry, before, "an illegal step changes nothing");
                continue;
            };
            match step {
                Step::Capture(buffer) => {
                    buffers.insert(buffer.0);
                }
                Step::Written(handle) => {
                    // The store takes the older handle over, and gives one for it.
                    if let Some(older) = before.handle() {
                        handles.remove(&older);
                    }
                    handles.insert(handle);
                }
                _ => {}
            }
            if let Some(buffer) = released.buffer {
                prop_assert!(buffers.remove(&buffer.0), "{before:?} {step:?}");
            }
            if let Some(handle) = released.handle {
                prop_assert!(handles.remove(&handle), "{before:?} {step:?}");
            }
            prop_assert_eq!(entry.buffer().map(|buffer| buffer.0), buffers.first().copied());
            prop_assert_eq!(entry.handle(), handles.first().copied());
            prop_assert!(buffers.len() <= 1 && handles.len() <= 1);
            if mark && entry.state() == State::Mapped {
                // Marks change nothing else.
                let marked = entry;
                entry.set_referenced();
                entry.set_stuck();
                prop_assert_eq!((entry.state(), entry.handle(), entry.is_removing()), (marked.state(), marked.handle(), marked.is_removing()));
            }
            prop_assert!(!entry.is_removing() || entry.state() == State::Mapped);
            prop_assert_eq!(entry.is_candidate(), entry.state() == State::Mapped && !entry.is_removing());
            let only_copy = matches!(entry.state(), State::Remote | State::Fetching);
            prop_assert!(!only_copy || entry.handle().is_some());
        }
    }
}
