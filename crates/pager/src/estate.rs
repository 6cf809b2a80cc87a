//! What a pager writes down of itself and its targets, for whoever takes over when it is killed.
//!
//! It is in the vault's private words. What counts is one store of a word each, after what it vouches for. The reader
//! believes none of it: numbers are checked by what they are used for, and a target that cannot be reached is passed over.

mod commons;
mod young;

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use spillway_core::evict::Run;
use spillway_core::policy::{Block, Kind, Scheme, Scope, Settings};
use spillway_core::shares::Share;
use spillway_core::streams::BLOCK_PAGES_MAX;
use spillway_core::{Address, PAGE_BYTES_U64, PageIndex, TargetId, TreeId};
use spillway_store::vault::{PRIVATE_WORDS, Vault};

use crate::adopt::Agent;
use crate::merging::Merging;
use crate::procfs;
use crate::sys::agent::{BATCH_PAGES, Layout};
use crate::sys::message::MESSAGES;
use crate::tally::Tally;
use crate::{Choice, Local};

pub use commons::{FoundCommons, NotedRemoval, Punching};
pub use young::{FoundYoung, Left};
use young::{INHERITS, KEPT_BY};

/// Targets that can be written down at one time, files of shared memory among them: what there is room for.
pub const TARGETS: usize = 250;
const RECORD_WORDS: usize = 1024;
const RECORDS_AT: usize = 2048;
const _: () = assert!(RECORDS_AT + TARGETS * RECORD_WORDS <= PRIVATE_WORDS);

// Words of the pager.
const PAGER: usize = 0;
const STARTED: usize = 1;
const LOCAL: usize = 2;
const SETTINGS: usize = 3;
const POOL_BYTES: usize = 4;
const INBOX_NUMBER: usize = 5;
const INBOX_TARGET: usize = 6;
const KIND: usize = 7;
const INBOX: usize = 8;
const LEAST_MAPPING: usize = INBOX + MESSAGES * 4;
const SHARED_MEMORY: usize = LEAST_MAPPING + 1;
const GUARDIAN: usize = SHARED_MEMORY + 1;
const POOL: usize = 128;
const POOL_WORDS: usize = 512;
const _: () = assert!(GUARDIAN < POOL);
/// What threads were about to remove when messages were last read: how many there are, then each.
const REMOVALS: usize = POOL + POOL_WORDS;
const REMOVAL_WORDS: usize = 5;
const REMOVALS_MAX: usize = (RECORDS_AT - REMOVALS - 1) / REMOVAL_WORDS;

// Words of a target.
const WHO: usize = 0;
const PROCESS: usize = 1;
const KNOWN_AS: usize = 2;
const STAGING: usize = 3;
const CONTROL: usize = 4;
const CODE: usize = 5;
const INSTRUCTION: usize = 6;
const BORN: usize = 7;
const KEPT: usize = 8;
const TREE: usize = 9;
const ROOT_BORN: usize = 10;
const MIN_PAGES: usize = 11;
const MAX_PAGES: usize = 12;
const WEIGHT: usize = 13;
const MERGING: usize = 14;
const ORDERED: usize = 15;
const BATCH: usize = 16;
const BATCH_RUNS: usize = 17;
/// It is a file of shared memory; the words that follow are of those (`estate/commons.rs`), or of who has no agent (`estate/young.rs`).
const COMMONS: usize = 18;
const RUNS: usize = 32;
const _: () = assert!(RUNS + BATCH_PAGES * 3 <= RECORD_WORDS);

/// How far a capture is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// The agent was told, or is about to be.
    Begun = 1,
    /// The table knows of it; pages are still to be read.
    Collected = 2,
}

/// A capture that was under way.
#[derive(Clone, Debug)]
pub struct Batch {
    /// How far.
    pub stage: Stage,
    /// Of what, in the order of staging.
    pub runs: Vec<Run>,
}

/// What is known of a target's agent.
#[derive(Clone, Debug)]
pub struct Found {
    /// Its identity in the core.
    pub id: TargetId,
    /// The tree that it belongs to,
    pub tree: TreeId,
    /// by which process that is known, and when it was started.
    pub root: (i32, u64),
    /// and what it may have of local memory.
    pub share: Share,
    /// Whether the kernel merges its pages.
    pub merging: Merging,
    /// The process, and when it was started.
    pub pid: i32,
    /// In ticks since the machine started.
    pub started: u64,
    /// The agent's thread.
    pub thread: i32,
    /// The same in its own pid namespace.
    pub known_as: i32,
    /// The userfaultfd's number in the agent's table.
    pub uffd: i32,
    /// The number there of our end of the socket.
    pub socket: i32,
    /// And of the control pages' file.
    pub memory: i32,
    /// Where things are.
    pub layout: Layout,
    /// A system call.
    pub instruction: u64,
    /// Whether the agent has, or is about to have, an order that it was not heard to be done with.
    pub is_ordered: bool,
    /// What was being captured.
    pub batch: Option<Batch>,
    /// Whether it is known what it has inherited.
    pub inherits: bool,
}

/// See the module's documentation.
#[derive(Clone)]
pub struct Estate {
    vault: Vault,
    words: &'static [AtomicU64],
}

impl Estate {
    /// In this vault.
    pub fn new(vault: Vault) -> Self {
        Self { words: vault.private(), vault }
    }

    /// The memory that it is in.
    pub fn vault(&self) -> &Vault {
        &self.vault
    }

    fn set(&self, at: usize, value: u64) {
        self.words[at].store(value, Release);
    }

    fn get(&self, at: usize) -> u64 {
        self.words[at].load(Acquire)
    }

    /// This process serves from now on, with this budget and these settings.
    pub fn claim(&self, local: Local, settings: Settings) {
        let own = std::process::id().cast_signed();
        self.set_pager(own, procfs::stat(own).map_or(0, |stat| stat.started));
        self.set_local(local);
        self.set_settings(settings);
    }

    fn set_pager(&self, pid: i32, started: u64) {
        self.set(STARTED, started);
        self.set(PAGER, pair(pid, 0));
    }

    /// Who served last, and when that process was started.
    pub fn pager(&self) -> (i32, u64) {
        (halves(self.get(PAGER)).0, self.get(STARTED))
    }

    /// Whether that is a daemon, which serves whatever it is told to.
    pub fn set_daemon(&self, is_daemon: bool) {
        self.set(KIND, is_daemon.into());
    }

    /// The same.
    pub fn is_daemon(&self) -> bool {
        self.get(KIND) == 1
    }

    /// The pool's URL. False when it is too long.
    pub fn set_pool(&self, url: &str) -> bool {
        if url.len() > POOL_WORDS * 8 {
            return false;
        }
        for (at, bytes) in (POOL..).zip(url.as_bytes().chunks(8)) {
            let mut word = [0; 8];
            word[..bytes.len()].copy_from_slice(bytes);
            self.set(at, u64::from_le_bytes(word));
        }
        self.set(POOL_BYTES, url.len() as u64);
        true
    }

    /// The same; none if there is no such text.
    pub fn pool(&self) -> Option<String> {
        let len = usize::try_from(self.get(POOL_BYTES)).ok().filter(|len| *len <= POOL_WORDS * 8)?;
        let bytes = (POOL..POOL + len.div_ceil(8)).flat_map(|at| self.get(at).to_le_bytes()).take(len).collect();
        String::from_utf8(bytes).ok()
    }

    /// The budget.
    pub fn set_local(&self, local: Local) {
        self.set(
            LOCAL,
            match local {
                Local::All => 0,
                Local::Percent(percent) => percent.into(),
                Local::Bytes(bytes) => bytes.max(1 << 8),
            },
        );
    }

    /// The same.
    pub fn local(&self) -> Local {
        match self.get(LOCAL) {
            0 => Local::All,
            percent @ 1..=100 => Local::Percent(u8::try_from(percent).expect("at most 100")),
            bytes => Local::Bytes(bytes.max(self.choice().floor_bytes())),
        }
    }

    /// Which mappings are managed.
    pub fn set_choice(&self, choice: Choice) {
        self.set(LEAST_MAPPING, choice.least_mapping_bytes);
        self.set(SHARED_MEMORY, choice.shared_memory.into());
    }

    /// The same.
    pub fn choice(&self) -> Choice {
        let (least_mapping_bytes, shared_memory) = (self.get(LEAST_MAPPING), self.get(SHARED_MEMORY) != 0);
        Choice { least_mapping_bytes, shared_memory, ..Choice::default() }
    }

    /// Which pages leave.
    pub fn set_settings(&self, Settings { policy, evict, scope, block }: Settings) {
        fn place<T: PartialEq>(all: &[T], one: &T) -> u8 {
            u8::try_from(all.iter().position(|other| other == one).unwrap_or(0)).unwrap_or(0)
        }
        let places = [
            place(Kind::ALL, &policy),
            place(Scheme::ALL, &evict),
            place(Scope::ALL, &scope),
            place(Block::ALL, &block),
        ];
        self.set(SETTINGS, u32::from_le_bytes(places).into());
    }

    /// The same.
    pub fn settings(&self) -> Settings {
        let [policy, evict, scope, block, ..] = self.get(SETTINGS).to_le_bytes().map(usize::from);
        let default = Settings::default();
        Settings {
            policy: *Kind::ALL.get(policy).unwrap_or(&default.policy),
            evict: *Scheme::ALL.get(evict).unwrap_or(&default.evict),
            scope: *Scope::ALL.get(scope).unwrap_or(&default.scope),
            block: *Block::ALL.get(block).unwrap_or(&default.block),
        }
    }

    /// Messages are about to be read from this target; the number of the first.
    pub fn begin_inbox(&self, id: TargetId) -> u64 {
        let number = self.words[INBOX_NUMBER].load(Relaxed) + MESSAGES as u64;
        self.set(INBOX_TARGET, id.0.into());
        self.set(INBOX_NUMBER, number);
        number
    }

    /// Where they are read to: four words each.
    pub fn inbox(&self) -> &'static [AtomicU64] {
        &self.words[INBOX..INBOX + MESSAGES * 4]
    }

    /// A message is no longer of interest.
    pub fn settle_message(&self, nth: usize) {
        self.set(INBOX + nth * 4, 0);
    }

    /// Whose messages were read last, and the number of the first.
    pub fn last_inbox(&self) -> (TargetId, u64) {
        (TargetId(u32::try_from(self.get(INBOX_TARGET)).unwrap_or(u32::MAX)), self.get(INBOX_NUMBER))
    }

    fn slots(&self) -> impl Iterator<Item = usize> + '_ {
        (0..TARGETS).map(|nth| RECORDS_AT + nth * RECORD_WORDS)
    }

    fn slot_of(&self, id: TargetId) -> Option<usize> {
        self.slots().find(|slot| self.get(slot + WHO) == u64::from(id.0) + 1)
    }

    /// A slot for a target of that tree, which is not valid yet: whoever has none of its own.
    fn slot_for(&self, id: TargetId, tally: &Tally) -> Option<usize> {
        let slot = self.slot_of(id).or_else(|| self.slots().find(|slot| self.get(slot + WHO) == 0))?;
        self.set(slot + WHO, 0);
        self.set(slot + BATCH, 0);
        self.set(slot + KEPT_BY, 0);
        self.set(slot + TREE, u64::from(tally.tree.0) | u64::from(tally.root.0.cast_unsigned()) << 32);
        self.set(slot + ROOT_BORN, tally.root.1);
        self.set(slot + WEIGHT, 0);
        Some(slot)
    }

    /// This target has this agent. False when there is no room for it.
    pub fn add(&self, id: TargetId, agent: &Agent, started: u64, tally: &Tally) -> bool {
        let Some(kept) = agent.kept else { return false };
        // One that had none until now is valid all the while.
        let young = self.slot_of(id).filter(|slot| self.get(slot + KEPT_BY) != 0);
        let Some(slot) = young.or_else(|| self.slot_for(id, tally)) else { return false };
        if young.is_none() {
            self.set(slot + INHERITS, 1);
        }
        self.set(slot + COMMONS, 0);
        self.set(slot + PROCESS, pair(agent.pid, agent.thread));
        self.set(slot + KNOWN_AS, pair(agent.known_as, agent.uffd));
        self.set(slot + KEPT, pair(kept.socket, kept.memory));
        self.set(slot + STAGING, agent.layout.staging.0);
        self.set(slot + CONTROL, agent.layout.control.0);
        self.set(slot + CODE, agent.layout.code.0);
        self.set(slot + INSTRUCTION, agent.instruction());
        self.set(slot + BORN, started);
        self.set(slot + MERGING, 0);
        self.set(slot + ORDERED, 0);
        self.set(slot + KEPT_BY, 0);
        self.set(slot + WHO, u64::from(id.0) + 1);
        true
    }

    /// The tree of this target may have this of local memory.
    pub fn set_share(&self, id: TargetId, share: Share) {
        let Some(slot) = self.slot_of(id) else { return };
        self.set(slot + MIN_PAGES, share.min_pages);
        self.set(slot + MAX_PAGES, share.max_pages);
        self.set(slot + WEIGHT, share.weight.into());
    }

    /// Whether the kernel merges pages of this target, and since before us.
    pub fn set_merging(&self, id: TargetId, merging: Merging) {
        let Some(slot) = self.slot_of(id) else { return };
        self.set(
            slot + MERGING,
            match merging {
                Merging::Untold => 0,
                Merging::Ours => 1,
                Merging::Its => 2,
            },
        );
    }

    /// Its agent is about to have an order, or was heard of. Where and whether it runs does not always tell: one that was stopped
    /// when it had read an order looks like one that waits for one.
    pub fn set_ordered(&self, id: TargetId, is_ordered: bool) {
        if let Some(slot) = self.slot_of(id) {
            self.set(slot + ORDERED, is_ordered.into());
        }
    }

    /// This target is no more.
    pub fn remove(&self, id: TargetId) {
        if let Some(slot) = self.slot_of(id) {
            self.set(slot + WHO, 0);
        }
    }

    /// A capture is about to begin: until [`Estate::set_batch`] there is none.
    pub fn prepare_batch(&self, id: TargetId, runs: &[Run]) {
        let Some(slot) = self.slot_of(id) else { return };
        self.set(slot + BATCH, 0);
        for (at, run) in (slot + RUNS..).step_by(3).zip(runs) {
            self.set(at, run.address.0);
            self.set(at + 1, run.page.0);
            self.set(at + 2, run.pages);
        }
        self.set(slot + BATCH_RUNS, runs.len() as u64);
    }

    /// The capture is at this stage; at none when all of its pages are in their buffers.
    pub fn set_batch(&self, id: TargetId, stage: Option<Stage>) {
        if let Some(slot) = self.slot_of(id) {
            self.set(slot + BATCH, stage.map_or(0, |stage| stage as u64));
        }
    }

    /// All targets.
    pub fn targets(&self) -> Vec<Found> {
        self.slots().filter_map(|slot| self.found(slot)).collect()
    }

    fn who(&self, slot: usize) -> Option<TargetId> {
        Some(TargetId(u32::try_from(self.get(slot + WHO).checked_sub(1)?).ok()?))
    }

    fn tree(&self, slot: usize) -> (TreeId, (i32, u64)) {
        let (tree, root) = halves(self.get(slot + TREE));
        (TreeId(tree.cast_unsigned()), (root, self.get(slot + ROOT_BORN)))
    }

    /// Without a weight there was none.
    fn share(&self, slot: usize) -> Share {
        let (min_pages, max_pages) = (self.get(slot + MIN_PAGES), self.get(slot + MAX_PAGES));
        match u32::try_from(self.get(slot + WEIGHT)) {
            Ok(weight @ 1..) if min_pages <= max_pages => Share { min_pages, max_pages, weight },
            _ => Share::default(),
        }
    }

    fn found(&self, slot: usize) -> Option<Found> {
        let id = self.who(slot).filter(|_| self.get(slot + COMMONS) == 0 && self.get(slot + KEPT_BY) == 0)?;
        let ((pid, thread), (known_as, uffd)) = (halves(self.get(slot + PROCESS)), halves(self.get(slot + KNOWN_AS)));
        let (socket, memory) = halves(self.get(slot + KEPT));
        let page = |at: usize| Some(Address(self.get(slot + at))).filter(|at| at.0 < 1 << 47 && at.page() == *at);
        let staging = page(STAGING)?;
        let scratch = staging.plus_pages(BATCH_PAGES as u64);
        let layout = Layout { staging, scratch, control: page(CONTROL)?, code: page(CODE)? };
        let (instruction, started) = (self.get(slot + INSTRUCTION), self.get(slot + BORN));
        let ((tree, root), share) = (self.tree(slot), self.share(slot));
        let merging = match self.get(slot + MERGING) {
            1 => Merging::Ours,
            2 => Merging::Its,
            _ => Merging::Untold,
        };
        let batch = self.batch(slot);
        Some(Found {
            id,
            tree,
            root,
            share,
            merging,
            pid,
            started,
            thread,
            known_as,
            uffd,
            socket,
            memory,
            layout,
            instruction,
            is_ordered: self.get(slot + ORDERED) != 0,
            batch,
            inherits: self.get(slot + INHERITS) != 0,
        })
    }

    fn batch(&self, slot: usize) -> Option<Batch> {
        let stage = match self.get(slot + BATCH) {
            1 => Stage::Begun,
            2 => Stage::Collected,
            _ => return None,
        };
        Some(Batch { stage, runs: self.runs(slot)? })
    }

    /// The runs of a capture, as far as they make sense: no more pages than staging has.
    fn runs(&self, slot: usize) -> Option<Vec<Run>> {
        let count = usize::try_from(self.get(slot + BATCH_RUNS)).ok().filter(|count| *count <= BATCH_PAGES)?;
        let mut left = BATCH_PAGES as u64;
        let mut runs = Vec::with_capacity(count);
        for at in (slot + RUNS..).step_by(3).take(count) {
            let (address, page, pages) = (self.get(at), self.get(at + 1), self.get(at + 2));
            left = left.checked_sub(pages)?;
            if pages == 0 || pages > BLOCK_PAGES_MAX || page >= 1 << 50 || !address.is_multiple_of(PAGE_BYTES_U64) {
                return None;
            }
            runs.push(Run { address: Address(address), page: PageIndex(page), pages });
        }
        Some(runs)
    }
}

fn pair(low: i32, high: i32) -> u64 {
    u64::from(low.cast_unsigned()) | u64::from(high.cast_unsigned()) << 32
}

fn halves(word: u64) -> (i32, i32) {
    let [a, b, c, d, e, f, g, h] = word.to_le_bytes();
    (i32::from_le_bytes([a, b, c, d]), i32::from_le_bytes([e, f, g, h]))
}
