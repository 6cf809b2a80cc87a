//! A server's entry, kept for as long as the server lives.

use std::time::Duration;

use crate::error::Error;
use crate::etcd::{Etcd, Lease};
use crate::{Cluster, Member};

/// How long an entry outlives a server that has vanished.
const LEASE: Duration = Duration::from_secs(6);

/// A load that differs by less from what is told is not told: each change is a write on etcd's disk.
const LOAD_STEP_PERCENT: u8 = 3;

/// See the module's documentation. Keep it with [`Registration::keep`].
pub struct Registration {
    etcd: Etcd,
    key: String,
    member: Member,
    lease: Option<Lease>,
}

impl Registration {
    /// How often it must be kept: three times in a lease, so that one answer may be lost.
    pub const EVERY: Duration = Duration::from_secs(LEASE.as_secs() / 3);

    /// Of `member` in `cluster`; nothing is said yet.
    #[must_use]
    pub fn new(cluster: &Cluster, member: &Member) -> Self {
        let key = format!("{}{}", cluster.prefix(), member.address);
        Self { etcd: cluster.etcd(), key, member: member.clone(), lease: None }
    }

    /// Makes the entry, or makes it last; the server is so busy now. True when it was made, because it was not there.
    ///
    /// # Errors
    /// When etcd does not answer: then the entry ends with its lease, and is made again by a later call.
    pub fn keep(&mut self, load_percent: u8) -> Result<bool, Error> {
        if let Some(lease) = &self.lease
            && self.etcd.keep_alive(lease)?
        {
            if load_percent.abs_diff(self.member.load_percent) >= LOAD_STEP_PERCENT {
                let now = Member { load_percent, ..self.member.clone() };
                self.etcd.put(&self.key, &now.to_entry(), lease)?;
                self.member = now;
            }
            return Ok(false);
        }
        self.lease = None;
        self.member.load_percent = load_percent;
        let lease = self.etcd.grant(LEASE.as_secs())?;
        self.etcd.put(&self.key, &self.member.to_entry(), &lease)?;
        self.lease = Some(lease);
        Ok(true)
    }

    /// Takes the entry away.
    ///
    /// # Errors
    /// When etcd does not answer: then it ends with its lease.
    pub fn leave(&mut self) -> Result<(), Error> {
        self.lease.take().map_or(Ok(()), |lease| self.etcd.revoke(&lease))
    }
}
