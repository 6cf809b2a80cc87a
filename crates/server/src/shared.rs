//! What all threads of the server share.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::mpsc::Sender;
use std::time::Instant;

use spillway_wire::answer::{Condition, ServerStatus};
use spillway_wire::tls;

use crate::config::Limits;
use crate::parked::Parked;
use crate::pool::Pool;
use crate::refusals::{Refusals, Why};
use crate::stats::{self, Meter};
use crate::tenants::{Seat, Tenants};

/// One server's state.
pub(crate) struct Shared {
    pub(crate) pool: Pool,
    pub(crate) tenants: Tenants,
    /// Empty for none.
    pub(crate) token: Vec<u8>,
    pub(crate) tls: Option<tls::Server>,
    pub(crate) limits: Limits,
    /// One a worker.
    pub(crate) meters: Box<[Meter]>,
    /// All that are served, with a hello or without.
    pub(crate) connections: AtomicUsize,
    /// Those of them that were let in.
    pub(crate) admitted: AtomicUsize,
    pub(crate) began: Instant,
    pub(crate) ending: AtomicBool,
    /// Whether clients are to move their pages elsewhere; none are taken meanwhile.
    pub(crate) leaving: AtomicBool,
    /// To whoever tells of them.
    pub(crate) refusals: Option<Refusals>,
    /// Gets that wait for the spill file.
    pub(crate) to_keeper: Option<Sender<Parked>>,
}

impl Shared {
    /// A peer was not let in.
    pub(crate) fn refused(&self, peer: SocketAddr, why: Why) {
        if let Some(refusals) = &self.refusals {
            refusals.note(peer, why);
        }
    }

    /// Whether there is room for one more client; it is counted then, until its connection has gone.
    pub(crate) fn admit(&self) -> bool {
        let has_room = self.admitted.fetch_add(1, Relaxed) < self.limits.connections_max;
        if !has_room {
            self.admitted.fetch_sub(1, Relaxed);
        }
        has_room
    }

    /// What every answer says.
    pub(crate) fn condition(&self) -> Condition {
        let leaving = self.is_leaving();
        let free_pages = if leaving { 0 } else { self.pool.free_pages() };
        Condition { load: stats::load(&self.meters), free_pages, leaving }
    }

    pub(crate) fn is_leaving(&self) -> bool {
        self.leaving.load(Relaxed)
    }

    /// What a tenant may know.
    pub(crate) fn status(&self, seat: &Seat) -> ServerStatus {
        let pool = &self.pool;
        let held = pool.holdings();
        let spilled_pages = pool.spill.as_ref().map_or(0, crate::spill::Spill::pages);
        ServerStatus {
            capacity_bytes: pool.budget.capacity(),
            used_bytes: pool.budget.used(),
            pages: held.keys,
            zero_pages: held.zeros,
            distinct_pages: held.distinct,
            stored_bytes: held.stored_bytes,
            spilled_pages,
            tenants: self.tenants.len() as u64,
            connections: self.connections.load(Relaxed) as u64,
            tenant_pages: seat.tenant.table.len(),
            served_pages: held.served,
            service_p50_ns: stats::quantile_ns(&self.meters, 0.5),
            service_p99_ns: stats::quantile_ns(&self.meters, 0.99),
            uptime_seconds: self.began.elapsed().as_secs(),
        }
    }
}
