//! What users choose, by name: policy, eviction scheme, scope, block.

use std::fmt;

/// A replacement policy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Kind {
    /// Round-robin in the table's order (Lim et al., section 4).
    Rr,
    /// The same, with a second chance for what came back.
    #[default]
    Clock,
    /// The same, with a second chance for what was touched, where access bits can be seen.
    Nru,
    /// In the order of arrival.
    Fifo,
    /// In the order of the last fault (FluidMem).
    Lru,
    /// Proactive, active and inactive queues (dcm, section 3.2).
    Lru3,
    /// A small queue on trial, a main queue, and a memory of what left.
    S3Fifo,
    /// One queue, a hand, and a mark for what came back.
    Sieve,
}

/// When pages are captured (Lim et al., section 4).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Scheme {
    /// When a fault finds no room.
    OnDemand,
    /// Ahead of faults, so that some room is always free.
    #[default]
    PreEvict,
}

/// Whose pages leave.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Scope {
    /// Those of the target whose faults take the room.
    Target,
    /// Everyone's, in proportion to what each has.
    #[default]
    Global,
}

/// How many adjacent pages move together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Block {
    /// 4 to 64 KiB, learnt place by place (dcm, section 4), and more for streams.
    #[default]
    Elastic,
    /// One page.
    K4,
    /// Two, aligned.
    K8,
    /// Four, aligned.
    K16,
    /// Eight, aligned.
    K32,
    /// Sixteen, aligned.
    K64,
}

/// All of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    /// Which pages leave.
    pub policy: Kind,
    /// When.
    pub evict: Scheme,
    /// Whose.
    pub scope: Scope,
    /// How many together, and how many come back for a fault.
    pub block: Block,
}

/// Why a text is no setting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SettingError {
    /// It is not of the form `KEY=VALUE`.
    NoPair(String),
    /// There is no such key.
    UnknownKey(String),
    /// The key has no such value.
    UnknownValue {
        /// The key.
        key: &'static str,
        /// What was given.
        value: String,
        /// What could have been, with commas between.
        valid: String,
    },
}

impl fmt::Display for SettingError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoPair(text) => {
                write!(f, "`{}` is no setting: write KEY=VALUE, such as policy=lru", text.escape_debug())
            }
            Self::UnknownKey(key) => {
                write!(f, "`{}` is no setting: the keys are {}", key.escape_debug(), Settings::KEYS.join(", "))
            }
            Self::UnknownValue { key, value, valid } => {
                write!(f, "`{}` is no value of {key}: give one of {valid}", value.escape_debug())
            }
        }
    }
}

impl std::error::Error for SettingError {}

/// Something that users name.
trait Named: Copy + 'static {
    const KEY: &'static str;
    const NAMES: &'static [(&'static str, Self)];

    fn parse(text: &str) -> Result<Self, SettingError> {
        let found = Self::NAMES.iter().find(|(name, _)| *name == text);
        found.map(|(_, value)| *value).ok_or_else(|| SettingError::UnknownValue {
            key: Self::KEY,
            value: text.into(),
            valid: Self::NAMES.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", "),
        })
    }
}

macro_rules! named {
    ($type:ident, $key:literal, $($name:literal => $variant:ident),*) => {
        impl Named for $type {
            const KEY: &'static str = $key;
            const NAMES: &'static [(&'static str, Self)] = &[$(($name, Self::$variant)),*];
        }

        impl $type {
            /// All of them.
            pub const ALL: &'static [Self] = &[$(Self::$variant),*];

            /// What users call it.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name),*
                }
            }
        }

        impl std::str::FromStr for $type {
            type Err = SettingError;

            fn from_str(text: &str) -> Result<Self, SettingError> {
                Self::parse(text)
            }
        }
    };
}

named!(Kind, "policy", "rr" => Rr, "clock" => Clock, "nru" => Nru, "fifo" => Fifo, "lru" => Lru, "lru3" => Lru3,
    "s3fifo" => S3Fifo, "sieve" => Sieve);
named!(Scheme, "evict", "on-demand" => OnDemand, "pre-evict" => PreEvict);
named!(Scope, "scope", "target" => Target, "global" => Global);

named!(Block, "block", "elastic" => Elastic, "4k" => K4, "8k" => K8, "16k" => K16, "32k" => K32, "64k" => K64);

impl Block {
    /// Its pages, where they are always as many.
    pub fn pages(self) -> Option<u64> {
        match self {
            Self::Elastic => None,
            Self::K4 => Some(1),
            Self::K8 => Some(2),
            Self::K16 => Some(4),
            Self::K32 => Some(8),
            Self::K64 => Some(16),
        }
    }
}

impl Kind {
    /// Whether it goes over the table instead of keeping pages in an order of its own.
    pub fn is_sweep(self) -> bool {
        matches!(self, Self::Rr | Self::Clock | Self::Nru)
    }

    /// Pages that are kept in buffers, after capture, for the chance that they come back. Policies that live from that
    /// signal keep more; none has more than a sixteenth of the budget there.
    pub fn inactive_pages(self, budget_pages: u64) -> u64 {
        let sixteenth = budget_pages / 16;
        match self {
            Self::Rr | Self::Clock | Self::Nru | Self::Fifo => (budget_pages / 64).clamp(4, 64).min(sixteenth),
            Self::Lru | Self::Lru3 | Self::S3Fifo | Self::Sieve => sixteenth.min(512),
        }
    }
}

impl Settings {
    /// What can be set.
    pub const KEYS: [&'static str; 4] = [Kind::KEY, Scheme::KEY, Scope::KEY, Block::KEY];

    /// Changes one setting: `policy=lru`.
    ///
    /// # Errors
    /// When `text` is no such pair; nothing is changed then.
    pub fn set(&mut self, text: &str) -> Result<(), SettingError> {
        let (key, value) = text.split_once('=').ok_or_else(|| SettingError::NoPair(text.into()))?;
        match key {
            Kind::KEY => self.policy = value.parse()?,
            Scheme::KEY => self.evict = value.parse()?,
            Scope::KEY => self.scope = value.parse()?,
            Block::KEY => self.block = value.parse()?,
            _ => return Err(SettingError::UnknownKey(key.into())),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_is_understood() {
        let mut settings = Settings::default();
        for &policy in Kind::ALL {
            settings.set(&format!("policy={}", policy.name())).expect("a policy");
            assert_eq!(settings.policy, policy);
        }
        for &evict in Scheme::ALL {
            settings.set(&format!("evict={}", evict.name())).expect("a scheme");
            assert_eq!(settings.evict, evict);
        }
        for &scope in Scope::ALL {
            settings.set(&format!("scope={}", scope.name())).expect("a scope");
            assert_eq!(settings.scope, scope);
        }
        for &block in Block::ALL {
            settings.set(&format!("block={}", block.name())).expect("a block");
            assert_eq!(settings.block, block);
            let kib = block.pages().map_or("elastic".into(), |pages| format!("{}k", 4 * pages));
            assert_eq!(block.name(), kib);
        }
    }

    #[test]
    fn what_is_no_setting_names_what_is_and_changes_nothing() {
        let before = Settings::default();
        let mut settings = before;
        for (text, expected) in [
            ("", "KEY=VALUE"),
            ("policy", "KEY=VALUE"),
            ("=", "the keys are policy, evict, scope, block"),
            ("Policy=lru", "the keys are policy, evict, scope, block"),
            ("policy=", "one of rr, clock, nru, fifo, lru, lru3, s3fifo, sieve"),
            ("policy=lru ", "one of rr, clock"),
            ("policy=lru=", "one of rr, clock"),
            ("evict=never", "one of on-demand, pre-evict"),
            ("block=128k", "one of elastic, 4k, 8k, 16k, 32k, 64k"),
            ("scope=all\n", "`all\\n` is no value of scope: give one of target, global"),
        ] {
            let error = settings.set(text).expect_err(text).to_string();
            assert!(error.contains(expected) && !error.contains('\n'), "{error}");
        }
        assert_eq!(settings, before);
    }
}
