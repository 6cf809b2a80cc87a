//! A store that lies on request: it shares identical pages, declines for a while, and loses pages.

use std::collections::BTreeMap;

use spillway_core::page::HandleBits;

/// What became of a page that was put.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Put {
    /// The previous copy held the same; its handle stays valid.
    Unchanged(HandleBits),
    /// Under this handle; the previous reference is released.
    Stored(HandleBits),
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
    references: u64,
}

impl Store {
    /// An empty store, which keeps identical pages once if it `shares`.
    pub fn new(shares: bool) -> Self {
        Self { shares, ..Self::default() }
    }

    /// Keeps a page.
    ///
    /// # Errors
    /// [`Full`] when it declines: the page was not taken, and `previous` is still valid.
    pub fn put(&mut self, value: u64, previous: Option<HandleBits>) -> Result<Put, Full> {
        if let Some(handle) = previous {
            let old = self.at(handle);
            if old.value == value && !old.lost {
                return Ok(Put::Unchanged(handle));
            }
        }
        let twin = self.by_value.get(&value).copied().filter(|_| self.shares).map(name);
        if twin.is_none() && self.full {
            return Err(Full);
        }
        // As the embedded pool does: the new reference is there before the old one goes.
        let handle = match twin {
            Some(twin) => self.share(twin),
            None => self.add(value),
        };
        previous.into_iter().for_each(|previous| self.release(previous));
        Ok(Put::Stored(handle))
    }

    /// What is behind a handle; none when the page is lost.
    pub fn get(&self, handle: HandleBits) -> Option<u64> {
        let kept = self.at(handle);
        (!kept.lost).then_some(kept.value)
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
            self.free.push(index(handle));
        }
    }

    /// Loses the next of the pages kept at or behind `nth`; what it held.
    pub fn lose(&mut self, nth: usize) -> Option<u64> {
        let from = nth.checked_rem(self.kept.len())?;
        let there = |(at, kept): (usize, &mut Option<Kept>)| Some((at, kept.as_mut().filter(|kept| !kept.lost)?.value));
        let (at, value) = self.kept.iter_mut().enumerate().skip(from).find_map(there)?;
        self.kept[at].as_mut().expect("just found").lost = true;
        if self.by_value.get(&value) == Some(&at) {
            self.by_value.remove(&value);
        }
        Some(value)
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
