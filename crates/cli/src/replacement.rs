//! `--policy`, `--evict`, `--scope`: which pages leave, when and whose.

use spillway_core::policy::{Kind, Scheme, Scope, Settings};

const POLICIES: &str = "\
Which pages leave first. No policy sees access bits: a page counts as used when
it comes back shortly after it left. docs/POLICIES.md has more.
  rr      round-robin by address
  clock   the same, but passes once over what came back
  fifo    what came first
  lru     what was not faulted on for longest
  lru3    what came back stays longer, in a queue of its own
  s3fifo  what is new is on trial; what is fetched again soon has passed it
  sieve   clock, in the order of arrival
";

/// What `run` and `attach` are given.
#[derive(Clone, Copy, clap::Args)]
pub(crate) struct Choices {
    /// Which pages leave first
    #[arg(long, value_name = "NAME", default_value = Kind::default().name(), long_help = POLICIES)]
    policy: Kind,
    /// When pages leave: pre-evict (some room is kept free) or on-demand
    #[arg(long, value_name = "SCHEME", default_value = Scheme::default().name())]
    evict: Scheme,
    /// Whose pages leave: global (everyone's) or target (of whoever needs room)
    #[arg(long, value_name = "SCOPE", default_value = Scope::default().name())]
    scope: Scope,
}

impl Choices {
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
