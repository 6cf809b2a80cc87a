//! `spillway serve --join`: the server's entry in its cluster, kept by a thread of its own.

use super::refused;
use crate::failure::Failure;
use crate::say;
use spillway_cluster::{Cluster, Host, Member, Registration};
use spillway_server::Error;
use std::net::SocketAddr;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;

/// What `spillway serve` is given about its cluster.
#[derive(clap::Args)]
pub(super) struct Membership {
    /// Let pools find this server: etcd://HOST:PORT,.../NAME
    #[arg(long, value_name = "URL")]
    join: Option<String>,
    /// Where clients reach this server; by default where it listens
    #[arg(long, value_name = "HOST:PORT", requires = "join")]
    advertise: Option<String>,
    /// What fails together with it: a rack, or else the host
    #[arg(long, value_name = "NAME", requires = "join")]
    domain: Option<String>,
}

impl Membership {
    /// The cluster, if one is to be joined by a server that listens on `listen`.
    pub(super) fn cluster(&self, listen: SocketAddr) -> Result<Option<Cluster>, Failure> {
        let Some(url) = &self.join else { return Ok(None) };
        if listen.ip().is_unspecified() && self.advertise.is_none() {
            return Err(Failure::refused(format!(
                "--join tells clients where this server is, and {listen} is no place: give --advertise HOST:PORT"
            )));
        }
        for (option, text) in [("--advertise", &self.advertise), ("--domain", &self.domain)] {
            let is_plain = |text: &String| !text.is_empty() && text.chars().all(|c| c.is_ascii_graphic() && c != ',');
            if text.as_ref().is_some_and(|text| !is_plain(text) || option == "--advertise" && !is_host(text)) {
                let how = if option == "--domain" { "a name without spaces" } else { "HOST:PORT" };
                return Err(Failure::refused(format!("{option} must be {how}")));
            }
        }
        let place = url.strip_prefix("etcd:").ok_or_else(|| {
            Failure::refused("--join takes the cluster's URL: give `etcd://HOST[:PORT],.../NAME`".to_string())
        })?;
        Cluster::parse(place).map(Some).map_err(|error| Failure::refused(format!("--join: {error}")))
    }

    /// Joins `cluster` with a server at `address`, which is as busy as `load` says.
    pub(super) fn join(
        &self,
        cluster: Cluster,
        address: SocketAddr,
        capacity_bytes: u64,
        load: impl Fn() -> u8 + Send + 'static,
    ) -> Result<Joined, Failure> {
        let address = self.advertise.clone().unwrap_or_else(|| address.to_string());
        let domain = self.domain.clone().unwrap_or_else(|| host_name().unwrap_or_else(|| address.clone()));
        let member = Member { address, domain, capacity_bytes, load_percent: 0 };
        let (stop, stopped) = channel();
        let work = move || keep(&cluster, &member, load, &stopped);
        let thread = crate::control::thread("join").spawn(work).map_err(|error| refused(&Error::Thread(error)))?;
        Ok(Joined { stop, thread })
    }
}

/// As pools read it.
fn is_host(text: &str) -> bool {
    Host::parse(text, 0).is_some_and(|host| host.port > 0)
}

fn host_name() -> Option<String> {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").ok()?;
    Some(name.trim().to_owned()).filter(|name| !name.is_empty())
}

/// A server that has joined.
pub(super) struct Joined {
    stop: Sender<()>,
    thread: JoinHandle<()>,
}

impl Joined {
    /// Leaves the cluster: pools put nothing there from now on.
    pub(super) fn leave(self) {
        drop(self.stop);
        let _ = self.thread.join();
    }
}

fn keep(cluster: &Cluster, member: &Member, load: impl Fn() -> u8, stopped: &Receiver<()>) {
    let mut registration = Registration::new(cluster, member);
    let mut is_well = true;
    loop {
        match registration.keep(load()) {
            Ok(made) => {
                if made {
                    say::note(format!("joined {cluster} as {}", member.address));
                }
                is_well = true;
            }
            Err(error) => {
                if is_well {
                    say::note(format!(
                        "{error}; clients that have this server are served all the same, and it is tried again"
                    ));
                }
                is_well = false;
            }
        }
        if stopped.recv_timeout(Registration::EVERY) != Err(RecvTimeoutError::Timeout) {
            break;
        }
    }
    if is_well && let Err(error) = registration.leave() {
        say::note(format!("the entry in {cluster} stays until its lease ends: {error}"));
    }
}
