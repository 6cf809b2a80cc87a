//! Why a run failed.

use std::fmt;

/// What went wrong, and how to see it again.
#[derive(Clone, Debug)]
pub struct Failure {
    /// What went wrong.
    pub message: String,
    /// The seed.
    pub seed: u64,
    /// At which step.
    pub step: u64,
    /// The last things that were done before.
    pub tail: Vec<String>,
}

impl Failure {
    /// A failure whose circumstances are filled in by the run.
    pub fn new(message: String) -> Self {
        Self { message, seed: 0, step: 0, tail: Vec::new() }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.tail.iter().try_for_each(|line| writeln!(f, "  {line}"))?;
        writeln!(f, "seed {}, step {}: {}", self.seed, self.step, self.message)?;
        write!(f, "see it again with SPILLWAY_SIM_SEED={} cargo test -p spillway-sim --test seeds", self.seed)
    }
}

impl std::error::Error for Failure {}
