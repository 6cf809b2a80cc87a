//! `--policy`, `--evict`, `--scope`, `--block`: which pages leave, when and whose, and how many move together.

use spillway_core::policy::{Block, Kind, Scheme, Scope, SettingError, Settings};
use spillway_pager::Snapshot;

const POLICIES: &str = "\
Which pages leave first. But for nru no policy sees access bits: a page counts
as used when it comes back shortly after it left. docs/POLICIES.md has more.
  rr      round-robin by address
  clock   the same, but passes once over what came back
  nru     the same, but passes over what was touched, as page tables tell; they are
          read through BPF (CAP_BPF, CAP_PERFMON). Where they can't be: clock
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
    /// Which pages leave first [default: clock]
    #[arg(long, value_name = "NAME", long_help = POLICIES)]
    policy: Option<Kind>,
    /// When pages leave: pre-evict (some room is kept free) or on-demand [default: pre-evict]
    #[arg(long, value_name = "SCHEME")]
    evict: Option<Scheme>,
    /// Whose pages leave: global (everyone's) or target (of whoever needs room) [default: global]
    #[arg(long, value_name = "SCOPE")]
    scope: Option<Scope>,
    /// How many adjacent pages move together: elastic, or 4k, 8k, 16k, 32k, 64k [default: elastic]
    #[arg(long, value_name = "SIZE", value_parser = block, long_help = BLOCKS)]
    block: Option<Block>,
}

impl Choices {
    /// What was chosen, and the defaults for what was not.
    pub(crate) fn settings(self) -> Settings {
        let default = Settings::default();
        Settings {
            policy: self.policy.unwrap_or(default.policy),
            evict: self.evict.unwrap_or(default.evict),
            scope: self.scope.unwrap_or(default.scope),
            block: self.block.unwrap_or(default.block),
        }
    }

    /// What was chosen otherwise than a pager has it: the option, and what the pager has.
    pub(crate) fn against(self, theirs: &Snapshot) -> Option<(&'static str, String)> {
        let all = [
            ("--policy", self.policy.map(Kind::name), &theirs.policy),
            ("--evict", self.evict.map(Scheme::name), &theirs.evict),
            ("--scope", self.scope.map(Scope::name), &theirs.scope),
            ("--block", self.block.map(Block::name), &theirs.block),
        ];
        let found = all.into_iter().find(|(_, chosen, theirs)| chosen.is_some_and(|chosen| chosen != theirs.as_str()));
        found.map(|(key, _, theirs)| (key, theirs.clone()))
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
