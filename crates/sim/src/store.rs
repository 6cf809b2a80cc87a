//! A store that lies on request: it shares identical pages, declines for a while, and loses pages. It answers at once, or
//! later and in any order ([`crate::transfers`]).

use std::collections::BTreeMap;

use spillway_core::page::HandleBits;

use crate::transfers::{Kind, Transfers};

/// What became of a page that was put.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Put {
    /// The previous copy held the same; its handle stays valid.
    Unchanged(HandleBits),
    /// Under this handle; the previous reference is released.
    Stored(HandleBits),
    /// Taken over; a completion follows. The previous reference is released, unless it is this one, still on its way.
    Pending(HandleBits),
}

/// What became of a page that was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Got {
    /// It holds this.
    Here(u64),
    /// A completion brings it.
    Pending,
    /// It is gone.
    Lost,
}

/// What was pending and has come to an end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Completion {
    /// All gets of this handle: what the page holds, or nothing when it is lost.
    Got(HandleBits, Option<u64>),
    /// A put: whether the page is kept. If not, the handle is void, and may name something else with the next put.
    Put(HandleBits, bool),
}

/// The store declined a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full;

#[derive(Clone, Copy, Debug)]
struct Kept {
    value: u64,
    references: u64,
    lost: bool,
}

/// See the module's documentation. Handles are reused as soon as they are free, so that a stale one names something else.
#[derive(Clone, Debug, Default)]
pub struct Store {
    kept: Vec<Option<Kept>>,
    free: Vec<usize>,
    by_value: BTreeMap<u64, usize>,
    /// Whether identical pages are kept once.
    shares: bool,
    /// Whether it declines.
    pub full: bool,
    /// No put fails that is begun now.
    pub well: bool,
    references: u64,
    /// What is pending, if it answers later.
    transfers: Option<Transfers>,
}

impl Store {
    /// An empty store, which keeps identical pages once if it `shares`.
    pub fn new(shares: bool, transfers: Option<Transfers>) -> Self {
        Self { shares, transfers, ..Self::default() }
    }

    /// Whether it answers later.
    pub fn answers_later(&self) -> bool {
        self.transfers.is_some()
    }

    /// How it answers, in words.
    pub fn manner(&self) -> String {
        self.transfers
            .as_ref()
            .map_or("the store answers at once".into(), |transfers| format!("{:?}", transfers.manner()))
    }

    /// Whether a put would be taken now.
    pub fn accepts(&self) -> bool {
        self.transfers.as_ref().is_none_or(Transfers::have_room)
    }

    /// One of the answers that have come by `now`.
    pub fn progress(&mut self, now: u64) -> Option<Completion> {
        let ended = self.transfers.as_mut()?.ended(now)?;
        let handle = name(ended.at);
        let kept = self.at(handle);
        Some(match ended.kind {
            Kind::Get => Completion::Got(handle, (!kept.lost).then_some(kept.value)),
            Kind::Put if ended.fails || self.full => {
                (0..kept.references).for_each(|_| self.release(handle));
                Completion::Put(handle, false)
            }
            Kind::Put => Completion::Put(handle, true),
        })
    }

    /// Keeps a page.
    ///
    /// # Errors
    /// [`Full`] when it declines: the page was not taken, and `previous` is still valid.
    pub fn put(&mut self, value: u64, mut previous: Option<HandleBits>, now: u64) -> Result<Put, Full> {
        if let Some(handle) = previous
            && self.holds(handle, value)
        {
            let pending = self.is_under_way(index(handle), Kind::Put);
            return Ok(if pending { Put::Pending(handle) } else { Put::Unchanged(handle) });
        }
        let twin = self.by_value.get(&value).copied().filter(|_| self.shares);
        // No two pages share what is not kept yet.
        let twin = twin.filter(|&twin| !self.is_under_way(twin, Kind::Put)).map(name);
        if twin.is_none() && self.full {
            return Err(Full);
        }
        if let Some(twin) = twin {
            let handle = self.share(twin);
            previous.into_iter().for_each(|previous| self.release(previous));
            return Ok(Put::Stored(handle));
        }
        // As the embedded pool does: the new reference is there before the old one goes. One that answers later may as well
        // use the old name for the new page.
        if self.transfers.as_mut().is_some_and(|transfers| transfers.chance(50)) {
            previous.take().into_iter().for_each(|previous| self.release(previous));
        }
        let handle = self.add(value);
        previous.into_iter().for_each(|previous| self.release(previous));
        let Some(transfers) = &mut self.transfers else { return Ok(Put::Stored(handle)) };
        transfers.begin(index(handle), Kind::Put, now, self.well);
        Ok(Put::Pending(handle))
    }

    /// Whether this is what is behind a handle.
    pub fn holds(&self, handle: HandleBits, value: u64) -> bool {
        let kept = self.at(handle);
        kept.value == value && !kept.lost
    }

    /// Asks for what is behind a handle.
    pub fn get(&mut self, handle: HandleBits, now: u64) -> Got {
        let kept = self.at(handle);
        if self.is_under_way(index(handle), Kind::Get) {
            return Got::Pending;
        }
        if let Some(transfers) = &mut self.transfers {
            // Some pages are at hand all the same, and some losses known.
            if !transfers.chance(10) {
                transfers.begin(index(handle), Kind::Get, now, true);
                return Got::Pending;
            }
        }
        if kept.lost { Got::Lost } else { Got::Here(kept.value) }
    }

    fn is_under_way(&self, at: usize, kind: Kind) -> bool {
        self.transfers.as_ref().is_some_and(|transfers| transfers.has(at, kind))
    }

    /// One more reference.
    pub fn share(&mut self, handle: HandleBits) -> HandleBits {
        self.at(handle);
        self.references += 1;
        self.kept[index(handle)].as_mut().expect("it is kept").references += 1;
        handle
    }

    /// One reference less.
    pub fn release(&mut self, handle: HandleBits) {
        self.at(handle);
        self.references -= 1;
        let slot = &mut self.kept[index(handle)];
        let kept = slot.as_mut().expect("it is kept");
        kept.references -= 1;
        if kept.references == 0 {
            if self.by_value.get(&kept.value) == Some(&index(handle)) {
                self.by_value.remove(&kept.value);
            }
            *slot = None;
            self.transfers.iter_mut().for_each(|transfers| transfers.call_off(index(handle)));
            self.free.push(index(handle));
        }
    }

    /// Loses the next of the pages kept at or behind `nth`; what it held.
    pub fn lose(&mut self, nth: usize) -> Option<u64> {
        let from = nth.checked_rem(self.kept.len())?;
        let there = |(at, kept): (usize, &Option<Kept>)| Some((at, kept.as_ref().filter(|kept| !kept.lost)?.value));
        // What is not kept yet is refused, not lost.
        let mut kept = self.kept.iter().enumerate().skip(from).filter_map(there);
        let (at, value) = kept.find(|(at, _)| !self.is_under_way(*at, Kind::Put))?;
        self.kept[at].as_mut().expect("just found").lost = true;
        if self.by_value.get(&value) == Some(&at) {
            self.by_value.remove(&value);
        }
        Some(value)
    }

    /// Whether there is a page under this handle.
    pub fn has(&self, handle: HandleBits) -> bool {
        self.kept.get(index(handle)).is_some_and(Option::is_some)
    }

    /// Whoever it was asked by is gone: what is pending has not happened, as far as anyone can tell.
    pub fn cut_off(&mut self) {
        for transfer in self.transfers.as_mut().map(Transfers::take_all).unwrap_or_default() {
            if transfer.kind == Kind::Put {
                let handle = name(transfer.at);
                (0..self.at(handle).references).for_each(|_| self.release(handle));
            }
        }
    }

    /// These are all references that there are.
    pub fn recount(&mut self, references: &BTreeMap<HandleBits, u64>) {
        for at in 0..self.kept.len() {
            let Some(held) = self.kept[at].map(|kept| kept.references) else { continue };
            let (handle, now) = (name(at), references.get(&name(at)).copied().unwrap_or(0));
            // One at a time and at least one more, so that the last goes the usual way.
            for _ in held..now {
                self.share(handle);
            }
            (now..held).for_each(|_| self.release(handle));
        }
    }

    /// References held.
    pub fn references(&self) -> u64 {
        self.references
    }

    fn add(&mut self, value: u64) -> HandleBits {
        let kept = Some(Kept { value, references: 1, lost: false });
        let at = self.free.pop().unwrap_or_else(|| {
            self.kept.push(None);
            self.kept.len() - 1
        });
        self.kept[at] = kept;
        self.by_value.insert(value, at);
        self.references += 1;
        name(at)
    }

    fn at(&self, handle: HandleBits) -> Kept {
        let kept = self.kept.get(index(handle)).copied().flatten();
        kept.unwrap_or_else(|| panic!("handle {handle} was never given, or was released"))
    }
}

fn name(at: usize) -> HandleBits {
    HandleBits::new(u32::try_from(at + 1).expect("few pages")).expect("not zero")
}

fn index(handle: HandleBits) -> usize {
    usize::try_from(handle.get()).expect("32 bits fit") - 1
}
