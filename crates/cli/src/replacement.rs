//! `--policy`, `--evict`, `--scope`: which pages leave, when and whose.

use spillway_core::policy::{Kind, Scheme, Scope, Settings};

/// What `run` and `attach` are given.
#[derive(Clone, Copy, clap::Args)]
pub(crate) struct Args {
    /// Which pages leave first: rr, clock, fifo, lru, lru3, s3fifo or sieve
    ///
    /// rr: round-robin through memory. clock: the same, but passes over a page once that came back within moments. fifo: the
    /// first to come. lru: the first whose last fault is longest ago. lru3: what came back within moments stays
    /// longer, in a queue of its own. s3fifo: what is new is on trial. sieve: clock in the order of arrival. No policy sees
    /// access bits: a page counts as used when it comes back shortly after it left. See docs/POLICIES.md.
    #[arg(long, value_name = "NAME", default_value = Kind::default().name())]
    policy: Kind,
    /// When pages leave: pre-evict keeps some room free, on-demand waits until a fault finds none
    #[arg(long, value_name = "SCHEME", default_value = Scheme::default().name())]
    evict: Scheme,
    /// Whose pages leave: those of all processes (global), or of the one whose faults need room (target)
    #[arg(long, value_name = "SCOPE", default_value = Scope::default().name())]
    scope: Scope,
}

impl Args {
    /// What was chosen.
    pub(crate) fn settings(self) -> Settings {
        Settings { policy: self.policy, evict: self.evict, scope: self.scope }
    }
}

/// The same as options, for another process of ours.
pub(crate) fn options(settings: Settings) -> [String; 3] {
    let Settings { policy, evict, scope } = settings;
    [format!("--policy={}", policy.name()), format!("--evict={}", evict.name()), format!("--scope={}", scope.name())]
}
