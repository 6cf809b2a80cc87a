//! The last things that were done, for whoever has to understand a failure.
//!
//! A run keeps no trace at first, because it costs more than the run; a run that fails is repeated with one.

use std::collections::VecDeque;

/// Lines kept.
const LINES: usize = 250;

/// See the module's documentation.
#[derive(Clone, Debug, Default)]
pub struct Trace(Option<VecDeque<String>>);

impl Trace {
    /// A trace that keeps its last lines, or one that keeps nothing.
    pub fn new(keep: bool) -> Self {
        Self(keep.then(VecDeque::new))
    }

    /// Something was done.
    pub fn note(&mut self, now: u64, line: impl FnOnce() -> String) {
        if let Some(lines) = &mut self.0 {
            if lines.len() == LINES {
                lines.pop_front();
            }
            lines.push_back(format!("{now:6} {}", line()));
        }
    }

    /// What was kept.
    pub fn tail(&self) -> Vec<String> {
        self.0.iter().flatten().cloned().collect()
    }
}
