//! A store that is waited for: for tests and tools, which have nothing else to do meanwhile.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use spillway_core::{PAGE_BYTES, Page};

use crate::{Completion, Got, Handle, Put, Store, StoreError, Urgency, remote};

/// What no store takes, unless it has lost a completion.
const TOO_LONG: Duration = Duration::from_secs(60);

/// Asks a store and waits for its answers.
pub struct Client {
    store: Box<dyn Store>,
    puts: HashMap<Handle, Result<(), StoreError>>,
    gets: HashMap<Handle, Result<Box<Page>, StoreError>>,
}

impl Client {
    /// Uses `store` from now on.
    #[must_use]
    pub fn new(store: Box<dyn Store>) -> Self {
        Self { store, puts: HashMap::new(), gets: HashMap::new() }
    }

    /// The store itself. Completions of what is begun here are kept for [`Client::finish_put`] and
    /// [`Client::finish_get`].
    pub fn store(&mut self) -> &mut dyn Store {
        &mut *self.store
    }

    /// Takes note of what happens, for so long.
    pub fn steps(&mut self, time: Duration) {
        let until = Instant::now() + time;
        while let Some(left) = until.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) {
            self.step(left);
        }
    }

    /// Waits for something to happen, at most so long, and takes note of it.
    pub fn step(&mut self, at_most: Duration) {
        self.store.flush();
        if let Some(descriptor) = self.store.descriptor() {
            remote::wait(descriptor, at_most);
        }
        let Self { store, puts, gets } = self;
        store.progress(&mut |completion| match completion {
            Completion::Got { handle, page } => {
                gets.insert(handle, page.map(|page| Box::new(*page)));
            }
            Completion::Put { handle, result } => {
                puts.insert(handle, result);
            }
        });
    }

    /// Keeps a page, and waits until it is kept. While the store takes none, tries again until `patience` has passed.
    ///
    /// # Errors
    /// As the store's. `previous` is then still valid, unless the error came later than the call.
    pub fn put(&mut self, page: &Page, previous: Option<Handle>, patience: Duration) -> Result<Handle, StoreError> {
        let until = Instant::now() + patience;
        loop {
            match self.store.put(page, previous) {
                Ok(Put::Unchanged(handle) | Put::Stored(handle)) => return Ok(handle),
                Ok(Put::Pending(handle)) => return self.finish_put(handle),
                Err(StoreError::Unavailable) if Instant::now() < until => self.step(Duration::from_millis(20)),
                Err(error) => return Err(error),
            }
        }
    }

    /// Waits for a put that is pending.
    ///
    /// # Errors
    /// As the store's.
    ///
    /// # Panics
    /// When the store does not answer within a minute: its bug.
    pub fn finish_put(&mut self, handle: Handle) -> Result<Handle, StoreError> {
        let started = Instant::now();
        loop {
            if let Some(result) = self.puts.remove(&handle) {
                return result.map(|()| handle);
            }
            assert!(started.elapsed() < TOO_LONG, "the put of {handle:?} was never answered");
            self.step(Duration::from_secs(1));
        }
    }

    /// Gets a page, and waits for it.
    ///
    /// # Errors
    /// As the store's.
    pub fn get(&mut self, handle: Handle) -> Result<Box<Page>, StoreError> {
        let mut page = Box::new([0; PAGE_BYTES]);
        // An answer from before may be that of an older page.
        self.gets.remove(&handle);
        match self.store.get(handle, Urgency::Demand, &mut page)? {
            Got::Here => Ok(page),
            Got::Pending => self.finish_get(handle),
        }
    }

    /// Waits for a get that is pending.
    ///
    /// # Errors
    /// As the store's.
    ///
    /// # Panics
    /// When the store does not answer within a minute: its bug.
    pub fn finish_get(&mut self, handle: Handle) -> Result<Box<Page>, StoreError> {
        let started = Instant::now();
        loop {
            if let Some(result) = self.gets.remove(&handle) {
                return result;
            }
            assert!(started.elapsed() < TOO_LONG, "the get of {handle:?} was never answered");
            self.step(Duration::from_secs(1));
        }
    }
}
