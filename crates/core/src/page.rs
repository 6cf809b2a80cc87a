//! The life of a page, written once.
//!
//! ```text
//! Untouched --fill--> Mapped              zeros
//! Untouched --find--> Mapped              was resident before its region was registered
//! Mapped    --capture--> Inactive         out of the target, in one of the pager's buffers or about to be read into it
//! Inactive  --read-zero--> Untouched      all zeros: nothing to keep
//! Inactive  --read-lost--> Lost           unreadable where it was moved to
//! Inactive  --refault--> Mapped           copied back from the buffer
//! Inactive  --write--> Writing --written--> Remote
//! Writing   --refault--> Mapped           stolen; what the write made is kept as the clean copy, or released
//! Writing   --hand--> Writing             the store answers later; until then the handle is good for nothing else
//! Writing   --keep--> Inactive            the store declined
//! Writing   --refuse--> Inactive          the same, later; the handle is void
//! Remote    --fetch--> Fetching --install--> Mapped      the pool copy is kept as the clean copy
//!                      Fetching --put-back--> Remote     the target's mappings were changing
//!                      Fetching --lose--> Lost           the store no longer has it
//! any       --remove--> Untouched         except Mapped, which waits as "removing" until the kernel has zapped it
//! ```
//!
//! A *clean copy* is a handle that the page keeps while it is local: when the page leaves again unchanged, nothing is
//! written. *Removing* marks a mapped page whose removal was announced and may not have happened yet: the kernel
//! announces `MADV_DONTNEED` before it zaps, so capturing the page in between would bring the old bytes back to life.

/// A store's name for a kept page, as the table holds it. Never zero.
pub type HandleBits = std::num::NonZeroU32;

/// Clean copies that a store is asked about at a time: as many as an answer has bits.
pub const BURDENS_MAX: usize = u64::BITS as usize;

/// Index of one of the pager's page buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BufferIndex(pub u32);

/// Buffers that an entry can name.
pub const BUFFERS_MAX: usize = 1 << 22;

/// Where a page is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Never touched, or given back by the target: reads as zeros.
    Untouched,
    /// In the target.
    Mapped,
    /// In a buffer, not yet handed to the store.
    Inactive,
    /// In a buffer, and on its way to the store.
    Writing,
    /// Only in the store.
    Remote,
    /// On its way from the store into the target.
    Fetching,
    /// Its only copy is gone: an access must fail loudly.
    Lost,
}

/// What happens to a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Zeros were installed.
    Fill,
    /// A scan saw it in the target.
    Find,
    /// It was moved out of the target, into this buffer.
    Capture(BufferIndex),
    /// Its bytes were read, and are all zeros.
    ReadZero,
    /// Its bytes could not be read, and are gone.
    ReadLost,
    /// It was installed from its buffer.
    Refault,
    /// Its write to the store began.
    Write,
    /// The store has it, under this handle.
    Written(HandleBits),
    /// The store took it, under this handle, and will say whether it keeps it.
    Hand(HandleBits),
    /// The store declined.
    Keep,
    /// The store did not keep it after all, and its handle is void.
    Refuse,
    /// Its clean copy is given up.
    Forgo,
    /// Its way back from the store began.
    Fetch,
    /// It was installed from the store.
    Install,
    /// It could not be installed now; the store still has it.
    PutBack,
    /// The store lost it.
    Lose,
    /// The target announced that it gives the page back.
    Remove,
    /// A removed page was seen to be gone.
    RemoveDone,
    /// A removed page is still there, and no removal is under way any more (`MADV_FREE`).
    RemoveSpared,
}

/// One page's place in the table: eight bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry(u64);

// Layout: bits 0..3 state, 3 joined, 4 referenced, 5 stuck, 6 removing, 7 used, 8 ahead, 9 stretched, 10..32 buffer, 32..64 handle (0:
// none).
const STATE_MASK: u64 = 0x7;
const JOINED: u64 = 1 << 3;
const REFERENCED: u64 = 1 << 4;
const STUCK: u64 = 1 << 5;
const REMOVING: u64 = 1 << 6;
const USED: u64 = 1 << 7;
const AHEAD: u64 = 1 << 8;
const STRETCHED: u64 = 1 << 9;
/// What outlives every step: it is about the block, and about its stay in local memory, not about the page's.
const BLOCK_MARKS: u64 = JOINED | USED | AHEAD | STRETCHED;
const BUFFER_SHIFT: u32 = 10;
const BUFFER_MASK: u64 = (BUFFERS_MAX as u64 - 1) << BUFFER_SHIFT;
const HANDLE_SHIFT: u32 = 32;
const HANDLE_MASK: u64 = 0xffff_ffff << HANDLE_SHIFT;

/// A step that has no meaning in the page's state: a bug in the pager, never in the target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Illegal {
    /// The state it was in.
    pub state: State,
    /// The step that was asked for.
    pub step: Step,
}

/// What a step leaves to be released by its caller.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Released {
    /// A buffer that no page uses any more.
    pub buffer: Option<BufferIndex>,
    /// A handle that no page uses any more.
    pub handle: Option<HandleBits>,
}

impl Entry {
    /// A page that nobody has touched.
    pub const UNTOUCHED: Self = Self(0);

    /// A page whose only copy is gone.
    pub const LOST: Self = Self(State::Lost as u64);

    /// A page that only the store has: how a forked child starts out with what its parent had evicted.
    pub fn remote(handle: HandleBits) -> Self {
        Self::UNTOUCHED.with_state(State::Remote).with_handle(Some(handle))
    }

    /// As it is kept in memory.
    pub(crate) fn bits(self) -> u64 {
        self.0
    }

    /// From what is kept in memory: any bits are an entry.
    pub(crate) fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    /// What is still true of it when its pager was killed, but for its buffer and its handle: those must be checked.
    /// What was under way has not happened; and a store that was being given the page may have used its old copy's place.
    pub(crate) fn survive(self) -> Self {
        let kept = Self(self.0 & (REMOVING | STUCK | HANDLE_MASK | BUFFER_MASK));
        match self.state() {
            State::Untouched => Self::UNTOUCHED,
            State::Mapped => Self(kept.0 & !BUFFER_MASK).with_state(State::Mapped),
            State::Inactive => Self(kept.0 & !REMOVING).with_state(State::Inactive),
            State::Writing => Self(kept.0 & !REMOVING).with_state(State::Inactive).with_handle(None),
            State::Remote | State::Fetching => Self(kept.0 & HANDLE_MASK).with_state(State::Remote),
            State::Lost => Self::LOST,
        }
    }

    /// Where the page is.
    pub fn state(self) -> State {
        match self.0 & STATE_MASK {
            0 => State::Untouched,
            1 => State::Mapped,
            2 => State::Inactive,
            3 => State::Writing,
            4 => State::Remote,
            5 => State::Fetching,
            _ => State::Lost,
        }
    }

    /// The buffer that holds it, when it is inactive or being written.
    pub fn buffer(self) -> Option<BufferIndex> {
        matches!(self.state(), State::Inactive | State::Writing)
            .then(|| BufferIndex(u32::try_from((self.0 & BUFFER_MASK) >> BUFFER_SHIFT).expect("22 bits fit in 32")))
    }

    /// The store's handle: the page's only copy when it is remote, else its clean copy.
    pub fn handle(self) -> Option<HandleBits> {
        HandleBits::new(u32::try_from(self.0 >> HANDLE_SHIFT).expect("32 bits fit in 32"))
    }

    /// Whether it may be captured now.
    pub fn is_candidate(self) -> bool {
        self.state() == State::Mapped && self.0 & REMOVING == 0
    }

    /// Whether its removal was announced and may not have happened.
    pub fn is_removing(self) -> bool {
        self.0 & REMOVING != 0
    }

    /// Takes back the second chance, if it had one; without `believing`, what came back soon after it left has none.
    pub fn take_chance(&mut self, believing: bool) -> bool {
        let chances = if believing { REFERENCED | STUCK } else { STUCK };
        let had = self.0 & chances != 0;
        self.0 &= !(REFERENCED | STUCK);
        had
    }

    /// The next sweep passes over it: it came back soon after it left.
    pub fn set_referenced(&mut self) {
        self.0 |= REFERENCED;
    }

    /// The next sweep passes over it: the kernel would not move it.
    pub fn set_stuck(&mut self) {
        self.0 |= STUCK;
    }

    /// Whether it was refused, and not passed over since. Of a page that is outside: what would have come before it could
    /// not be installed.
    pub fn is_stuck(self) -> bool {
        self.0 & STUCK != 0
    }

    /// Whether it is in one block with the page before it ([`crate::blocks`]).
    pub fn is_joined(self) -> bool {
        self.0 & JOINED != 0
    }

    /// Whether it is known to have been used since its block was last outside as a whole.
    pub fn is_used(self) -> bool {
        self.0 & USED != 0
    }

    /// Whether it last came without having been asked for.
    pub fn is_ahead(self) -> bool {
        self.0 & AHEAD != 0
    }

    /// Whether it was joined to the page before it since their block was last outside as a whole.
    pub fn is_stretched(self) -> bool {
        self.0 & STRETCHED != 0
    }

    /// Puts it into one block with the page before it.
    pub(crate) fn join(&mut self) {
        self.0 |= JOINED | STRETCHED;
    }

    /// It begins a block.
    pub(crate) fn part(&mut self) {
        self.0 &= !(JOINED | STRETCHED);
    }

    /// It came because it was asked for.
    pub(crate) fn set_asked(&mut self) {
        self.0 = self.0 & !AHEAD | USED;
    }

    /// It came without having been asked for.
    pub(crate) fn set_ahead(&mut self) {
        self.0 = self.0 & !USED | AHEAD;
    }

    /// It was touched while it was local, however it had come.
    pub(crate) fn set_used(&mut self) {
        self.0 |= USED;
    }

    /// Its block is outside: what was known of its use is no more.
    pub(crate) fn forget_use(&mut self) {
        self.0 &= !(USED | AHEAD | STRETCHED);
    }

    /// The only way from one state to another.
    ///
    /// # Errors
    /// [`Illegal`] when the step has no meaning in this state; the entry is unchanged then.
    pub fn step(&mut self, step: Step) -> Result<Released, Illegal> {
        use State::{Fetching, Inactive, Lost, Mapped, Remote, Untouched, Writing};
        let (old, state) = (*self, self.state());
        let mut released = Released::default();
        let blank = Self(old.0 & BLOCK_MARKS);
        *self = match (state, step) {
            (Untouched, Step::Fill | Step::Find) => blank.with_state(Mapped),
            (Mapped, Step::Find) => old,
            // A fault on a mapped page: the target's own removal was carried out, so it reads as zeros from now on.
            (Mapped, Step::Fill) => {
                released.handle = old.handle();
                blank.with_state(Mapped)
            }
            (Mapped, Step::Capture(buffer)) if !old.is_removing() => {
                blank.with_state(Inactive).with_buffer(buffer).with_handle(old.handle())
            }
            (Inactive, Step::ReadZero) => {
                released = Released { buffer: old.buffer(), handle: old.handle() };
                blank
            }
            (Inactive, Step::ReadLost) => {
                released = Released { buffer: old.buffer(), handle: old.handle() };
                blank.with_state(Lost)
            }
            (Inactive | Writing, Step::Refault) => {
                released.buffer = old.buffer();
                blank.with_state(Mapped).with_handle(old.handle())
            }
            (Inactive, Step::Write) => old.with_state(Writing),
            (Writing, Step::Written(handle)) => {
                released.buffer = old.buffer();
                blank.with_state(Remote).with_handle(Some(handle))
            }
            (Writing, Step::Hand(handle)) => old.with_handle(Some(handle)),
            (Writing, Step::Keep) => old.with_state(Inactive),
            (Writing, Step::Refuse) => old.with_state(Inactive).with_handle(None),
            (Mapped | Inactive, Step::Refuse) => old.with_handle(None),
            (Mapped, Step::Forgo) => {
                released.handle = old.handle();
                old.with_handle(None)
            }
            (Remote, Step::Fetch) => old.with_state(Fetching),
            (Fetching, Step::Install) => blank.with_state(Mapped).with_handle(old.handle()),
            (Fetching, Step::PutBack) => old.with_state(Remote),
            (Fetching, Step::Lose) => {
                released.handle = old.handle();
                blank.with_state(Lost)
            }
            (Mapped, Step::Remove) => {
                released.handle = old.handle();
                Self(blank.with_state(Mapped).0 | REMOVING)
            }
            (Mapped, Step::RemoveDone) if old.is_removing() => blank,
            (Mapped, Step::RemoveSpared) => Self(old.0 & !REMOVING),
            (Untouched | Inactive | Writing | Remote | Fetching | Lost, Step::Remove) => {
                released = Released { buffer: old.buffer(), handle: old.handle() };
                blank
            }
            _ => return Err(Illegal { state, step }),
        };
        Ok(released)
    }

    fn with_state(self, state: State) -> Self {
        Self(self.0 & !STATE_MASK | state as u64)
    }

    fn with_buffer(self, buffer: BufferIndex) -> Self {
        debug_assert!((buffer.0 as usize) < BUFFERS_MAX, "the pager sizes its buffers below BUFFERS_MAX");
        Self(self.0 & !BUFFER_MASK | u64::from(buffer.0) << BUFFER_SHIFT)
    }

    pub(crate) fn with_handle(self, handle: Option<HandleBits>) -> Self {
        Self(self.0 & !HANDLE_MASK | u64::from(handle.map_or(0, HandleBits::get)) << HANDLE_SHIFT)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn handle(bits: u32) -> HandleBits {
        HandleBits::new(bits).expect("not zero")
    }

    /// One entry for each state, with every optional part that it can have.
    fn entries() -> Vec<Entry> {
        let buffer = BufferIndex(7);
        let mapped = Entry::UNTOUCHED.with_state(State::Mapped);
        let clean = mapped.with_handle(Some(handle(9)));
        let mut removing = clean;
        removing.step(Step::Remove).expect("legal");
        let inactive = Entry::UNTOUCHED.with_state(State::Inactive).with_buffer(buffer);
        vec![
            Entry::UNTOUCHED,
            mapped,
            clean,
            removing,
            inactive,
            inactive.with_handle(Some(handle(9))),
            inactive.with_state(State::Writing),
            inactive.with_state(State::Writing).with_handle(Some(handle(9))),
            Entry::remote(handle(9)),
            Entry::remote(handle(9)).with_state(State::Fetching),
            Entry::UNTOUCHED.with_state(State::Lost),
        ]
    }

    const STEPS: [Step; 19] = [
        Step::Fill,
        Step::Find,
        Step::Capture(BufferIndex(3)),
        Step::ReadZero,
        Step::ReadLost,
        Step::Refault,
        Step::Write,
        Step::Written(HandleBits::MAX),
        Step::Hand(HandleBits::MAX),
        Step::Keep,
        Step::Refuse,
        Step::Forgo,
        Step::Fetch,
        Step::Install,
        Step::PutBack,
        Step::Lose,
        Step::Remove,
        Step::RemoveDone,
        Step::RemoveSpared,
    ];

    /// The diagram, spelled out a second time: state, step, next state.
    fn expected(entry: Entry, step: Step) -> Option<State> {
        use State::{Fetching, Inactive, Lost, Mapped, Remote, Untouched, Writing};
        match (entry.state(), step) {
            (Untouched, Step::Fill | Step::Find) => Some(Mapped),
            (Mapped, Step::Fill | Step::Find | Step::RemoveSpared) => Some(Mapped),
            (Mapped, Step::Forgo) => Some(Mapped),
            (Mapped, Step::Capture(_)) => (!entry.is_removing()).then_some(Inactive),
            (Inactive, Step::ReadZero) => Some(Untouched),
            (Inactive, Step::ReadLost) => Some(Lost),
            (Mapped, Step::RemoveDone) => entry.is_removing().then_some(Untouched),
            (Mapped, Step::Remove) => Some(Mapped),
            (Inactive | Writing, Step::Refault) => Some(Mapped),
            (Inactive, Step::Write) => Some(Writing),
            (Writing, Step::Written(_)) => Some(Remote),
            (Writing, Step::Hand(_)) => Some(Writing),
            (Writing, Step::Keep | Step::Refuse) => Some(Inactive),
            (state @ (Mapped | Inactive), Step::Refuse) => Some(state),
            (Remote, Step::Fetch) => Some(Fetching),
            (Fetching, Step::Install) => Some(Mapped),
            (Fetching, Step::PutBack) => Some(Remote),
            (Fetching, Step::Lose) => Some(Lost),
            (_, Step::Remove) => Some(Untouched),
            _ => None,
        }
    }

    #[test]
    fn every_state_meets_every_step() {
        for before in entries() {
            for step in STEPS {
                let mut after = before;
                match (after.step(step), expected(before, step)) {
                    (Ok(_), Some(state)) => assert_eq!(after.state(), state, "{before:?} {step:?}"),
                    (Err(illegal), None) => {
                        assert_eq!(illegal, Illegal { state: before.state(), step });
                        assert_eq!(after, before, "an illegal step changes nothing");
                    }
                    (got, want) => panic!("{before:?} {step:?}: got {got:?}, want {want:?}"),
                }
            }
        }
    }

    #[test]
    fn no_buffer_and_no_handle_is_ever_forgotten() {
        for before in entries() {
            for step in STEPS {
                let mut after = before;
                let Ok(released) = after.step(step) else { continue };
                if let Some(buffer) = before.buffer() {
                    assert!(after.buffer() == Some(buffer) || released.buffer == Some(buffer), "{before:?} {step:?}");
                }
                // `Written` and `Hand` leave the older handle to the store, which releases or returns it (`Store::put`);
                // a handle that is refused was released by the store.
                let stores = matches!(step, Step::Written(_) | Step::Hand(_) | Step::Refuse);
                if let (Some(handle), false) = (before.handle(), stores) {
                    assert!(after.handle() == Some(handle) || released.handle == Some(handle), "{before:?} {step:?}");
                }
                assert!(released.buffer.is_none() || after.buffer().is_none(), "{before:?} {step:?}");
                assert!(released.handle.is_none() || after.handle().is_none(), "{before:?} {step:?}");
            }
        }
    }

    #[test]
    fn a_removing_page_is_no_candidate_until_it_is_filled_anew() {
        let mut entry = Entry::UNTOUCHED;
        entry.step(Step::Fill).expect("legal");
        assert!(entry.is_candidate());
        entry.step(Step::Remove).expect("legal");
        assert!(!entry.is_candidate() && entry.is_removing());
        entry.step(Step::Fill).expect("legal");
        assert!(entry.is_candidate() && !entry.is_removing());
    }

    #[test]
    fn a_second_chance_is_taken_once() {
        let mut entry = Entry::UNTOUCHED.with_state(State::Mapped);
        entry.set_referenced();
        entry.set_stuck();
        assert!(entry.take_chance(true));
        assert!(!entry.take_chance(true));
        entry.set_referenced();
        assert!(!entry.take_chance(false));
        entry.set_stuck();
        assert!(entry.take_chance(false));
        assert_eq!(entry.state(), State::Mapped);
    }
}
