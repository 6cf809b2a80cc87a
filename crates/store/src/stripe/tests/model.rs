//! A pager's part: a table that remembers what each page must hold, and judges all that comes.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use spillway_core::{PAGE_BYTES, Page};

use super::servers::{Simulated, World};
use crate::stripe::table::State;
use crate::stripe::{Mutation, Shape, Stripes};
use crate::vault::Vault;
use crate::{Completion, Got, Handle, Put, Store, StoreError, Urgency};

/// No get takes longer: its deadline, a reconstruction after that, and some looking.
const PATIENCE: Duration = Duration::from_secs(8);

#[derive(Clone, Copy, Debug)]
pub(super) struct Entry {
    pub(super) handle: Handle,
    content: u64,
    pub(super) putting: bool,
    pub(super) getting: Option<Instant>,
}

/// What is done to servers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Weather {
    /// At most as many servers are lost at once as there is parity, and what they had is rebuilt between.
    Survivable,
    /// Anything, on any of them.
    Wild,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Setting {
    pub(super) shape: Shape,
    pub(super) servers: usize,
    pub(super) entries: usize,
    pub(super) steps: u64,
    pub(super) weather: Weather,
    pub(super) mutation: Option<Mutation>,
    /// Whether the pager is killed now and then.
    pub(super) mortal: bool,
}

#[derive(Debug, Default)]
pub(super) struct Seen {
    pub(super) got: u64,
    pub(super) lost: u64,
    pub(super) declined: u64,
    pub(super) faults: u64,
    pub(super) moved: u64,
    pub(super) dropped: u64,
    pub(super) rebuilt: u64,
    pub(super) hedged: u64,
    pub(super) deaths: u64,
}

pub(super) struct Model {
    pub(super) world: Arc<Mutex<World>>,
    pub(super) stripes: Stripes,
    pub(super) setting: Setting,
    pub(super) table: Vec<Option<Entry>>,
    pub(super) seen: Seen,
    contents: u64,
    seed: u64,
    /// What outlives the pager.
    pub(super) vault: Vault,
    /// What was completed and is not in the table yet.
    pub(super) told: Vec<Told>,
    /// The entry that is being put.
    pub(super) writing: Option<usize>,
    /// An entry whose page may have been replaced, and its handle freed.
    pub(super) doubted: Option<usize>,
}

type Told = (Handle, Option<Result<Box<Page>, StoreError>>, Result<(), StoreError>);

/// Told by its number; the first bytes say which.
fn page(content: u64) -> Page {
    let mut page = [content.to_le_bytes()[0]; PAGE_BYTES];
    for (at, word) in page.chunks_exact_mut(64).enumerate() {
        word[..8].copy_from_slice(&content.wrapping_mul(0x9e37_79b9_7f4a_7c15 + at as u64).to_le_bytes());
    }
    page
}

impl Model {
    pub(super) fn new(setting: Setting, seed: u64) -> Self {
        let world = Arc::new(Mutex::new(World::new(setting.servers, seed)));
        let vault = Vault::create_for(10).unwrap();
        let lasting = setting.mortal.then_some(&vault);
        let stripes = Stripes::new(Box::new(Simulated(Arc::clone(&world))), setting.shape, lasting);
        let table = vec![None; setting.entries];
        let (seen, told) = (Seen::default(), Vec::new());
        let mut model =
            Self { world, stripes, setting, table, seen, contents: 0, seed, vault, told, writing: None, doubted: None };
        model.prepare();
        model
    }

    pub(super) fn prepare(&mut self) {
        let core = &mut self.stripes.core;
        core.random = self.seed | 1;
        core.mutation = self.setting.mutation;
        // Few pages are to be compacted, too.
        core.upkeep.rows_min = 1;
        core.upkeep.compact.earn(f64::MAX);
    }

    pub(super) fn below(&self, limit: u64) -> u64 {
        self.world.lock().unwrap().below(limit)
    }

    pub(super) fn now(&self) -> Instant {
        self.world.lock().unwrap().now
    }

    /// How often an alarm was set.
    pub(super) fn alarms(&self) -> u32 {
        self.world.lock().unwrap().alarms
    }

    fn entry(&self) -> usize {
        usize::try_from(self.below(self.table.len() as u64)).unwrap()
    }

    /// Everything, and then everything once more in peace.
    pub(super) fn run(&mut self) {
        if self.setting.mortal {
            self.live_and_die(self.setting.steps);
        } else {
            (0..self.setting.steps).for_each(|_| self.step());
        }
        self.calm();
        self.until("all is answered", |model| {
            model.table.iter().flatten().all(|entry| !entry.putting && entry.getting.is_none())
        });
        self.read_all();
        if self.setting.weather == Weather::Survivable {
            self.until("all is rebuilt", Self::is_whole);
        }
        let held = self.table.iter().flatten().count() as u64;
        assert_eq!(self.stripes.status().stored_bytes, held * PAGE_BYTES as u64, "references are counted");
        self.assert_that_rows_are_counted();
        (0..self.table.len()).for_each(|at| self.free(at));
        self.until("nothing is left", |model| {
            let core = &model.stripes.core;
            core.is_written_out() && core.jobs.are_done() && model.world.lock().unwrap().chunks() == 0
        });
        assert_eq!(self.stripes.core.counts.groups, 0, "no group is left");
    }

    /// What is known of rows without looking at them is what looking at them tells.
    fn assert_that_rows_are_counted(&self) {
        let core = &self.stripes.core;
        let written: Vec<u32> = core.rows.all().filter(|row| core.rows.is_written(*row)).collect();
        let alone = |row: &&u32| core.rows.lives(**row).outside == 0;
        assert!(written.iter().all(|row| core.rows.is_alone(*row) == alone(&row)));
        assert!(core.rows.all().all(|row| !core.rows.is_alone(row) || written.contains(&row)));
        assert_eq!(core.upkeep.counted(), (written.len(), written.iter().filter(alone).count()));
    }

    /// Something in each entry, and all of it kept.
    pub(super) fn fill(&mut self) {
        for at in 0..self.table.len() {
            while self.table[at].is_none() {
                self.put(at);
            }
        }
        self.until("all is kept", |model| model.table.iter().flatten().all(|entry| !entry.putting));
    }

    /// The same, however often a page is refused.
    pub(super) fn insist(&mut self) {
        while !self.table.iter().all(|entry| entry.is_some_and(|entry| !entry.putting)) {
            for at in 0..self.table.len() {
                if self.table[at].is_none() {
                    self.put(at);
                }
            }
            self.progress();
        }
    }

    /// Whether nothing is being read.
    pub(super) fn is_answered(&self) -> bool {
        self.table.iter().flatten().all(|entry| entry.getting.is_none())
    }

    /// Reads everything.
    pub(super) fn read_all(&mut self) {
        for at in 0..self.table.len() {
            self.get(at, Urgency::Demand);
        }
        self.until("all is answered", Self::is_answered);
    }

    pub(super) fn until(&mut self, what: &str, holds: impl Fn(&Self) -> bool) {
        let from = self.now();
        while !holds(self) {
            self.progress();
            self.stripes.tidy();
            assert!(self.now() < from + Duration::from_secs(60), "{what}: not in a minute: {}", self.what_is_left());
        }
    }

    pub(super) fn step(&mut self) {
        match self.below(1000) {
            0..350 => self.put(self.entry()),
            350..500 => self.get(self.entry(), Urgency::Demand),
            500..560 => self.get(self.entry(), Urgency::Prefetch),
            560..600 => self.share(),
            600..660 => self.free(self.entry()),
            660..680 => self.give_some_up(),
            680..720 => self.stripes.flush(),
            720..800 => drop(self.stripes.tidy()),
            800..812 => self.worse(),
            812..830 => self.better(),
            _ => self.progress(),
        }
    }

    pub(super) fn worse(&mut self) {
        let broken =
            |world: &World| world.servers.iter().filter(|server| server.away_since.is_some() || server.lies).count();
        let survivable = self.setting.weather == Weather::Survivable;
        let victim = usize::try_from(self.below(self.setting.servers as u64)).unwrap();
        let kind = self.below(7);
        let whole = !survivable || self.is_whole();
        let mut world = self.world.lock().unwrap();
        let now = world.now;
        let stall = now + Duration::from_millis(world.below(900));
        // What was lost to two at once must not have been lost to a third.
        let may = whole || kind == 0;
        if !may || survivable && kind > 0 && broken(&world) > 0 {
            return;
        }
        self.seen.faults += 1;
        match kind {
            0 => world.servers[victim].stalled_until = Some(stall),
            1 | 2 => world.cut(victim, true),
            3 => world.cut(victim, false),
            4 => world.servers[victim].lies = true,
            5 => world.servers[victim].full = true,
            _ => world.servers[victim].leaving = true,
        }
        if survivable && self.setting.shape.parity == 2 && (1..5).contains(&kind) && world.below(2) == 0 {
            let other = (victim + 1) % self.setting.servers;
            world.cut(other, kind == 1);
        }
    }

    fn better(&mut self) {
        let victim = usize::try_from(self.below(self.setting.servers as u64)).unwrap();
        let mut world = self.world.lock().unwrap();
        let server = &mut world.servers[victim];
        (server.full, server.lies, server.leaving) = (false, false, false);
        if world.servers[victim].away_since.is_some() {
            world.mend(victim);
        }
    }

    pub(super) fn calm(&mut self) {
        let mut world = self.world.lock().unwrap();
        for member in 0..self.setting.servers {
            let server = &mut world.servers[member];
            (server.full, server.lies, server.leaving) = (false, false, false);
            if world.servers[member].away_since.is_some() {
                world.mend(member);
            }
        }
    }

    /// Puts what is kept already; whether that was seen.
    pub(super) fn put_again(&mut self, at: usize) -> bool {
        let entry = self.table[at].expect("it is kept");
        let put = self.stripes.put(&page(entry.content), Some(entry.handle)).expect("it is taken");
        if let Put::Pending(handle) = put {
            self.table[at] = Some(Entry { handle, putting: true, ..entry });
        }
        put == Put::Unchanged(entry.handle)
    }

    /// The server that has what was put.
    pub(super) fn member_of(&self, at: usize) -> usize {
        let core = &self.stripes.core;
        let State::Kept(place, _) = core.pages.state(self.table[at].expect("it is kept").handle) else {
            panic!("it is being put")
        };
        let chunk = core.rows.chunk(place.row, place.position).expect("it is kept");
        usize::from(self.stripes.members.chunk(chunk, self.now()).member)
    }

    pub(super) fn put(&mut self, at: usize) {
        if self.table[at].is_some_and(|entry| entry.getting.is_some()) {
            return;
        }
        let previous = self.table[at];
        let content = match previous {
            Some(entry) if self.below(6) == 0 => entry.content,
            _ => {
                self.contents += 1;
                self.contents
            }
        };
        self.writing = Some(at);
        let put = self.stripes.put(&page(content), previous.map(|entry| entry.handle));
        self.writing = None;
        let entry = match put {
            Ok(Put::Unchanged(handle)) => {
                let entry = previous.expect("unchanged from nothing");
                assert_eq!((handle, content, false), (entry.handle, entry.content, entry.putting));
                entry
            }
            Ok(Put::Pending(handle)) => Entry { handle, content, putting: true, getting: None },
            Ok(Put::Stored(_)) => panic!("servers answer later"),
            Err(StoreError::Full | StoreError::Unavailable) => {
                self.seen.declined += 1;
                return self.progress();
            }
            Err(error) => panic!("{error}"),
        };
        self.table[at] = Some(entry);
    }

    pub(super) fn get(&mut self, at: usize, urgency: Urgency) {
        let Some(Entry { handle, content, getting, .. }) = self.table[at] else { return };
        let mut got = [0xee; PAGE_BYTES];
        match self.stripes.get(handle, urgency, &mut got) {
            Ok(Got::Here) => self.check(content, &got),
            Ok(Got::Pending) => {
                let now = self.now();
                self.table[at].as_mut().expect("just seen").getting = Some(getting.unwrap_or(now));
            }
            Err(StoreError::Unavailable) => {}
            Err(error) => self.lose(at, error),
        }
    }

    fn check(&mut self, content: u64, got: &Page) {
        assert!(*got == page(content), "wrong bytes: not the page that was put");
        self.seen.got += 1;
    }

    fn lose(&mut self, at: usize, error: StoreError) {
        assert!(matches!(error, StoreError::Lost | StoreError::Corrupt), "{error:?}");
        assert!(self.setting.weather == Weather::Wild, "a page is lost: {error:?}: {}", self.what_is_left());
        self.seen.lost += 1;
        if let Some(entry) = &mut self.table[at] {
            entry.getting = None;
        }
    }

    fn share(&mut self) {
        let (to, from) = (self.entry(), self.entry());
        self.share_with(to, from);
    }

    pub(super) fn share_with(&mut self, to: usize, from: usize) {
        let Some(entry) = self.table[from].filter(|_| from != to) else { return };
        let handle = self.stripes.share(entry.handle);
        self.free(to);
        self.table[to] = Some(Entry { handle, ..entry });
    }

    pub(super) fn free(&mut self, at: usize) {
        if let Some(entry) = self.table[at].take() {
            self.stripes.free(entry.handle);
        }
    }

    /// The page is local as well: does without the copy if that is a burden. Whether it was.
    pub(super) fn give_up(&mut self, at: usize) -> bool {
        let is_burden = self.table[at].is_some_and(|entry| self.stripes.burdens(&[entry.handle]) != 0);
        if is_burden {
            self.free(at);
        }
        is_burden
    }

    fn give_some_up(&mut self) {
        for at in 0..self.table.len() {
            if self.below(2) == 0 {
                self.give_up(at);
            }
        }
    }

    pub(super) fn progress(&mut self) {
        if self.below(3) > 0 {
            self.world.lock().unwrap().pass();
        }
        let told = &mut self.told;
        self.stripes.progress(&mut |completion| match completion {
            Completion::Got { handle, page } => told.push((handle, Some(page.map(|page| Box::new(*page))), Ok(()))),
            Completion::Put { handle, result } => told.push((handle, None, result)),
        });
        for (handle, page, result) in std::mem::take(&mut self.told) {
            self.tell(handle, page.as_ref(), result);
        }
        let now = self.now();
        for entry in self.table.iter().flatten() {
            assert!(entry.getting.is_none_or(|since| now < since + PATIENCE), "a get never ends");
        }
    }

    pub(super) fn tell(
        &mut self,
        handle: Handle,
        page: Option<&Result<Box<Page>, StoreError>>,
        result: Result<(), StoreError>,
    ) {
        let about = |entry: &Option<Entry>| entry.is_some_and(|entry| entry.handle == handle);
        let entries: Vec<usize> = (0..self.table.len()).filter(|at| about(&self.table[*at])).collect();
        assert!(!entries.is_empty(), "a completion for what was freed");
        if page.is_none() && result.is_ok() && self.setting.weather == Weather::Survivable {
            self.assert_protected(handle);
        }
        for at in entries {
            let entry = self.table[at].as_mut().expect("just seen");
            match page {
                Some(Ok(page)) => {
                    entry.getting = None;
                    let content = entry.content;
                    self.check(content, page);
                }
                Some(Err(error)) => self.lose(at, *error),
                None => {
                    assert!(std::mem::take(&mut entry.putting), "a put completes once");
                    if result.is_err() {
                        self.seen.declined += 1;
                        self.table[at] = None;
                    }
                }
            }
        }
    }

    /// A page that was just put survives as many losses as it should, those that have been counted.
    fn assert_protected(&self, handle: Handle) {
        let core = &self.stripes.core;
        let State::Kept(place, _) = core.pages.state(handle) else { return };
        let world = self.world.lock().unwrap();
        let broken = world.servers.iter().filter(|server| server.away_since.is_some() || server.lies).count();
        let used = core.shape.used(core.rows.length(place.row));
        let there = |at: &u8| core.rows.chunk(place.row, *at).is_some_and(|chunk| world.has(chunk));
        let missing = used.filter(|at| !there(at)).count();
        // Servers that have come back empty count until what they had is rebuilt.
        let before = if core.upkeep.is_awake() { core.shape.parity } else { broken };
        assert!(missing <= before, "an acknowledged page misses {missing} chunks while {broken} servers are away");
        drop(world);
        self.assert_apart(place.row);
    }

    fn assert_apart(&self, row: u32) {
        let core = &self.stripes.core;
        let chunks = core.shape.used(core.rows.length(row)).filter_map(|at| core.rows.chunk(row, at));
        let alive = chunks.map(|chunk| self.stripes.members.chunk(chunk, self.now()));
        let alive = alive.filter(|chunk| chunk.presence != crate::stripe::members::Presence::Dead);
        let mut members: Vec<u8> = alive.map(|chunk| chunk.member).collect();
        let count = members.len();
        members.sort_unstable();
        members.dedup();
        assert_eq!(members.len(), count, "two chunks of a row are at one server");
    }

    /// For whoever looks into a failure.
    fn what_is_left(&self) -> String {
        let core = &self.stripes.core;
        let world = self.world.lock().unwrap();
        let mut text = format!("{:?}, awake {}", core.counts, core.upkeep.is_awake());
        for (member, server) in
            world.servers.iter().enumerate().filter(|(_, server)| server.away_since.is_some() || server.lies)
        {
            text += &format!("; server {member} is away or lies ({})", server.lies);
        }
        for row in (0..u32::try_from(core.rows.len()).unwrap()).filter(|row| core.rows.is_written(*row)) {
            for at in core.shape.used(core.rows.length(row)) {
                let chunk = core.rows.chunk(row, at);
                if !chunk.is_some_and(|chunk| world.has(chunk)) {
                    text += &format!("; row {row} misses {at}: {chunk:?} {:?}", chunk.map(|chunk| world.about(chunk)));
                }
            }
        }
        text
    }

    /// Every chunk is where it should be.
    pub(super) fn is_whole(&self) -> bool {
        let core = &self.stripes.core;
        let world = self.world.lock().unwrap();
        let there = |row: u32, at: u8| core.rows.chunk(row, at).is_some_and(|chunk| world.has(chunk));
        let rows = (0..u32::try_from(core.rows.len()).unwrap()).filter(|row| core.rows.is_written(*row));
        let mut whole = rows.into_iter().all(|row| core.shape.used(core.rows.length(row)).all(|at| there(row, at)));
        whole &= world.servers.iter().all(|server| server.away_since.is_none() && !server.lies);
        whole && core.are_fills_whole(|chunk| world.has(chunk)) && core.jobs.rebuilding == 0
    }
}
