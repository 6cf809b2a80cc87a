//! Who has pages here, and on which connections.
//!
//! A tenant's secret is what it came with first. It lives while it has a connection, and a lease longer if it has pages:
//! those that only look at a server, or tell it to leave, come and go without. *Take over* raises the tenant's epoch while no
//! connection of it is carrying out anything; those of earlier epochs may not go on.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, RwLock, RwLockReadGuard};
use std::time::{Duration, Instant};

use spillway_wire::auth::Secret;
use spillway_wire::hello::{Code, Nonce, Received, TenantId};

use crate::mix::random_u64;
use crate::table::Table;

/// One pager's pages.
pub(crate) struct Tenant {
    id: TenantId,
    secret: Secret,
    /// Random: another one means that the pages of before are gone.
    pub(crate) incarnation: u64,
    /// Marks its pages, so that only it shares them. Never zero.
    pub(crate) scope: u32,
    pub(crate) table: Table,
    epoch: RwLock<u64>,
    /// Bytes of answers that wait for the spill file, on all its connections.
    parked_bytes: AtomicUsize,
}

impl Tenant {
    pub(crate) fn parked_bytes(&self) -> usize {
        self.parked_bytes.load(Relaxed)
    }
}

/// Bytes of an answer that are counted as a tenant's, as long as it lives.
pub(crate) struct Claim {
    tenant: Arc<Tenant>,
    bytes: usize,
}

impl Claim {
    pub(crate) fn new(tenant: &Arc<Tenant>, bytes: usize) -> Self {
        tenant.parked_bytes.fetch_add(bytes, Relaxed);
        Self { tenant: Arc::clone(tenant), bytes }
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.tenant.parked_bytes.fetch_sub(self.bytes, Relaxed);
    }
}

/// A connection's right to a tenant's pages.
#[derive(Clone)]
pub(crate) struct Seat {
    pub(crate) tenant: Arc<Tenant>,
    epoch: u64,
}

impl Seat {
    /// The right to carry out requests while the guard lives; `None` for ever after someone else took over.
    pub(crate) fn sit(&self) -> Option<RwLockReadGuard<'_, u64>> {
        let epoch = self.tenant.epoch.read().expect("nothing panics with an epoch locked");
        (*epoch == self.epoch).then_some(epoch)
    }
}

struct Entry {
    tenant: Arc<Tenant>,
    connections: usize,
    /// When the last connection ended; the lease runs from there.
    left: Instant,
}

/// All tenants.
pub(crate) struct Tenants {
    by_id: Mutex<HashMap<TenantId, Entry>>,
    max: usize,
    lease: Duration,
    next_scope: AtomicU32,
}

impl Tenants {
    pub(crate) fn new(max: usize, lease: Duration) -> Self {
        Self { by_id: Mutex::default(), max, lease, next_scope: AtomicU32::new(1) }
    }

    pub(crate) fn len(&self) -> usize {
        self.entries().len()
    }

    /// Keys of all tenants.
    pub(crate) fn keys(&self) -> u64 {
        self.entries().values().map(|entry| entry.tenant.table.len()).sum()
    }

    /// Seats a connection whose hello proves what it must. Whether the tenant existed, too.
    pub(crate) fn enter(
        &self,
        received: &Received,
        token: &[u8],
        challenge: &Nonce,
        now: Instant,
    ) -> Result<(Seat, bool), Code> {
        let hello = received.hello;
        let (tenant, existed) = {
            let mut entries = self.entries();
            let room = entries.len() < self.max;
            let existed = entries.contains_key(&hello.tenant);
            let entry = match entries.get_mut(&hello.tenant) {
                Some(entry) if received.knows_secret(&entry.tenant.secret, challenge) => entry,
                Some(_) => return Err(Code::Tenant),
                None if !hello.create => return Err(Code::UnknownTenant),
                None if !room => return Err(Code::Busy),
                None => {
                    let secret = received.new_secret(token, challenge).ok_or(Code::Tenant)?;
                    let tenant = Arc::new(self.make(hello.tenant, secret).ok_or(Code::Busy)?);
                    entries.entry(hello.tenant).or_insert(Entry { tenant, connections: 0, left: now })
                }
            };
            entry.connections += 1;
            (Arc::clone(&entry.tenant), existed)
        };
        let epoch = if hello.take_over {
            // Waits until no other connection of the tenant is in the middle of something: a few milliseconds at most.
            let mut epoch = tenant.epoch.write().expect("nothing panics with an epoch locked");
            *epoch += 1;
            *epoch
        } else {
            *tenant.epoch.read().expect("nothing panics with an epoch locked")
        };
        Ok((Seat { tenant, epoch }, existed))
    }

    /// `None` once all scopes are used up: pages of another tenant may still have the one that would come again.
    fn make(&self, id: TenantId, secret: Secret) -> Option<Tenant> {
        let scope = self.next_scope.fetch_update(Relaxed, Relaxed, |scope| scope.checked_add(1)).ok()?;
        let (incarnation, table, epoch, parked_bytes) =
            (random_u64(), Table::new(), RwLock::new(0), AtomicUsize::new(0));
        Some(Tenant { id, secret, incarnation, scope, table, epoch, parked_bytes })
    }

    /// A seated connection has ended. With the last of them goes a tenant that has no pages: there is nothing to keep for
    /// it, and what of its answers is still under way needs no tenant.
    pub(crate) fn leave(&self, seat: &Seat, now: Instant) {
        let mut entries = self.entries();
        if let Some(entry) = entries.get_mut(&seat.tenant.id) {
            entry.connections -= 1;
            entry.left = now;
            if entry.connections == 0 && entry.tenant.table.len() == 0 {
                entries.remove(&seat.tenant.id);
            }
        }
    }

    /// Takes those out whose lease is over: nobody can reach their pages any more.
    pub(crate) fn take_expired(&self, now: Instant) -> Vec<Arc<Tenant>> {
        let over =
            |entry: &mut Entry| entry.connections == 0 && now.saturating_duration_since(entry.left) >= self.lease;
        self.entries().extract_if(|_, entry| over(entry)).map(|(_, entry)| entry.tenant).collect()
    }

    fn entries(&self) -> MutexGuard<'_, HashMap<TenantId, Entry>> {
        self.by_id.lock().expect("nothing panics with the tenants locked")
    }
}

#[cfg(test)]
mod tests {
    use spillway_wire::hello::{Hello, Versions};

    use super::*;

    #[test]
    fn no_scope_is_given_twice() {
        let tenants = Tenants::new(8, Duration::ZERO);
        tenants.next_scope.store(u32::MAX - 2, Relaxed);
        let enter = |tenant| {
            let (versions, challenge) = (Versions::default(), [3; 32]);
            let hello = Hello { versions, create: true, take_over: false, tenant: [tenant; 16], nonce: [9; 32] };
            let received = Received::decode(&hello.encode(b"", &[tenant; 16], &challenge)).unwrap();
            tenants.enter(&received, b"", &challenge, Instant::now()).map(|(seat, _)| seat.tenant.scope)
        };
        let scopes = [1, 2, 3, 1].map(enter);
        assert_eq!(scopes, [Ok(u32::MAX - 2), Ok(u32::MAX - 1), Err(Code::Busy), Ok(u32::MAX - 2)]);
    }
}
