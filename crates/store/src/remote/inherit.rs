//! Taking over what another process has put at servers: what is in the ledger, as far as the servers still have it.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use super::handles::{Handles, State};
use super::ledger::{Ledger, Note};
use super::protocol::Protocol;
use super::server::Server;
use super::{GREETING_MAX, Peer, Remote, Settings, TICK_TROUBLED, wait};
use crate::hash::PageHash;
use crate::pool::{OpenError, OpenErrorKind};
use crate::vault::Vault;
use crate::{Handle, Inheritance, Store};

/// How long servers that can be spared are waited for: those that are there take a few milliseconds, and a target waits.
const SPARED_AFTER: Duration = Duration::from_millis(200);

impl<P: Protocol> Remote<P> {
    /// Connects to the servers as the process that was there before, in their order. Those that are away may come back later, but
    /// one must be there, and one that refuses is an error. Those that can be spared are not waited for; without what others have
    /// whose names are unknown, and who may never be back, nothing is taken over.
    pub(crate) fn take_over(
        ledger: Ledger,
        servers: Vec<(Peer<P>, Note)>,
        settings: Settings,
        spare: usize,
        vault: &Vault,
    ) -> Result<Self, OpenError> {
        let now = Instant::now();
        let hash = PageHash::with_secrets(vault.secret(0), Some(vault.secret(1)));
        let (handles, left) = Handles::take_over(ledger, servers.len());
        let nameless = servers.iter().enumerate().filter(|(_, (peer, _))| peer.addresses.is_empty());
        let mut needed =
            nameless.filter(|&(at, _)| left.iter().any(|&handle| usize::from(handles.slot(handle).server) == at));
        if let Some((_, (peer, _))) = needed.nth(spare) {
            return Err(OpenError::no_such_name(&peer.name));
        }
        let servers = servers.into_iter().map(|(peer, note)| Server::resume(peer, &note, now)).collect();
        let mut remote = Self::of(servers, handles, hash, settings, now)?;
        remote.left = left;
        let (until, spared) = (now + remote.at_most(GREETING_MAX), now + remote.at_most(SPARED_AFTER));
        while !remote.servers.iter().all(Server::is_ready) {
            Store::progress(&mut remote, &mut |_| {});
            let refusal = |server: &Server<P>| {
                let (kind, text) = server.failure.clone()?;
                Some(OpenError { server: server.name.clone(), kind, text })
            };
            // One that never let us in has nothing of ours.
            let known = remote.servers.iter().filter(|server| server.epoch > 0);
            let refusals = known.filter_map(refusal);
            let (away, refused): (Vec<_>, Vec<_>) =
                refusals.partition(|refusal| refusal.kind == OpenErrorKind::Unreachable);
            if let Some(refusal) = refused.into_iter().next() {
                return Err(refusal);
            }
            let (now, missing) = (Instant::now(), remote.servers.iter().filter(|server| !server.is_ready()).count());
            let is_known = |server: &Server<P>| server.is_ready() || server.failure.is_some();
            let any = remote.servers.iter().any(Server::is_ready);
            // Nobody waits for what nobody listens for: with time, a pool may have many servers that are no more.
            if (now > spared && missing <= spare) || (any && remote.servers.iter().all(is_known)) {
                return Ok(remote);
            }
            if now > until {
                let silent = || OpenError {
                    server: remote.servers[0].name.clone(),
                    kind: OpenErrorKind::Unreachable,
                    text: "it does not answer: see whether it is overloaded, stopped, or cut off".into(),
                };
                return if any { Ok(remote) } else { Err(away.into_iter().next().unwrap_or_else(silent)) };
            }
            wait(remote.poller.as_fd(), TICK_TROUBLED);
        }
        Ok(remote)
    }

    /// How a server is from now on, for whoever takes over. Nothing was put on its present connection yet.
    pub(super) fn write_down(&mut self, at: usize) {
        if let Some(ledger) = &self.handles.ledger {
            ledger.set_note(at, &self.servers[at].note());
        }
    }
}

impl<P: Protocol> Inheritance for Remote<P> {
    fn has(&self, handle: Handle) -> bool {
        handle.bits() <= self.handles.len() && {
            let slot = self.handles.slot(handle);
            slot.state == State::Kept && self.servers[usize::from(slot.server)].has(slot.epoch)
        }
    }

    fn count(&mut self, handle: Handle) {
        self.handles.count(handle);
    }

    fn all_counted(&mut self) {
        for handle in std::mem::take(&mut self.left) {
            if self.handles.is_abandoned(handle) {
                self.leave(handle);
            }
        }
    }
}
