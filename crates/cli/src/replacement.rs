//! `--policy`, `--evict`, `--scope`, `--block`: which pages leave, when and whose, and how many move together.

use spillway_core::policy::{Block, Kind, Scheme, Scope, SettingError, Settings};

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

const BLOCKS: &str = "\
How many adjacent pages come back, and leave, together.
  elastic    4 to 64 KiB, learnt place by place: neighbours that are used together
             come to move together, and part when half of them are not used;
             scans come back ahead of themselves
  4k to 64k  always so many (8k, 16k, 32k)
";

/// What `run`, `attach` and `trace` are given.
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
    /// How many adjacent pages move together: elastic, or 4k, 8k, 16k, 32k, 64k
    #[arg(long, value_name = "SIZE", value_parser = block, default_value = Block::default().name(), long_help = BLOCKS)]
    block: Block,
}

impl Choices {
    /// What was chosen.
    pub(crate) fn settings(self) -> Settings {
        Settings { policy: self.policy, evict: self.evict, scope: self.scope, block: self.block }
    }
}

/// Sizes are written in either case elsewhere, so here too.
pub(crate) fn block(text: &str) -> Result<Block, SettingError> {
    text.to_ascii_lowercase().parse()
}

/// The same as options, for another process of ours.
pub(crate) fn options(settings: Settings) -> [String; 4] {
    let Settings { policy, evict, scope, block } = settings;
    [
        format!("--policy={}", policy.name()),
        format!("--evict={}", evict.name()),
        format!("--scope={}", scope.name()),
        format!("--block={}", block.name()),
    ]
}
