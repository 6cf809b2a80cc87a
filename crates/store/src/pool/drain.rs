//! Having a server leave: it takes no more pages, and pagers move theirs to the others.

use spillway_wire::answer::{self, AnswerBody};
use spillway_wire::request;

use super::open::read_token;
use super::status::{Heard, Line, ask_status, enter, fail, other};
use super::{Host, OpenError, OpenErrorKind, Tcp, Tls, Url, hosts};

/// The version of the protocol that first knew servers that leave.
const LEAVING_SINCE: u16 = 2;

/// A server that was asked to leave, or to stay.
pub struct Drain {
    line: Line,
    /// Host and port.
    pub server: String,
}

impl Drain {
    /// Asks `server`, one of the pool's, to leave, or to stay.
    ///
    /// # Errors
    /// When the pool has no such server, or it does not answer, or knows of no leaving.
    pub fn ask(url: &str, server: &str, leaves: bool) -> Result<Self, OpenError> {
        let Url::Tcp(pool) = Url::parse(url)?.with_servers()? else {
            let text = "only servers of spillway can leave: name a `tcp:` or an `etcd:` pool";
            return Err(fail(OpenErrorKind::Unsuitable, text));
        };
        let host = of(&pool, server)?;
        let name = host.to_string();
        let named = |error: OpenError| OpenError { server: name.clone(), ..error };
        let token = pool.token_file.as_deref().map(read_token).transpose()?.unwrap_or_default();
        let tls = pool.tls.as_ref().map(Tls::read).transpose()?;
        let tls = tls.as_ref().map(|tls| tls.of(&host)).transpose()?;
        let (line, version) = enter(&host, tls.as_ref(), token).map_err(named)?;
        if version < LEAVING_SINCE {
            let text = "its version of spillway knows no leaving: its pages end with it, unless the pool has parity";
            return Err(named(fail(OpenErrorKind::Unsuitable, text)));
        }
        let mut drain = Self { line, server: name };
        drain.tell(leaves)?;
        Ok(drain)
    }

    /// Tells the server to leave, or to stay.
    ///
    /// # Errors
    /// When it does not answer.
    pub fn tell(&mut self, leaves: bool) -> Result<(), OpenError> {
        let mut question = Vec::new();
        request::leave(&mut question, 1, leaves);
        let told = self.line.say(&question).and_then(|()| self.line.hear(hear_left));
        told.map_err(|error| OpenError { server: self.server.clone(), ..error })
    }

    /// Pages that are there still, of all pagers, and how many pagers those are of.
    ///
    /// # Errors
    /// When the server does not answer, or was told to stay meanwhile.
    pub fn left(&mut self) -> Result<(u64, u64), OpenError> {
        let named = |error: OpenError| OpenError { server: self.server.clone(), ..error };
        let (status, condition) = ask_status(&mut self.line).map_err(named)?;
        if !condition.leaving {
            return Err(named(fail(OpenErrorKind::Unsuitable, "it was told to stay meanwhile")));
        }
        // Without the one that asks.
        Ok((status.pages, status.tenants.saturating_sub(1)))
    }
}

fn of(pool: &Tcp, server: &str) -> Result<Host, OpenError> {
    let named = hosts::parse("tcp", server, 7070).ok().filter(|hosts| hosts.len() == 1);
    let host = named.and_then(|named| pool.hosts.iter().find(|host| **host == named[0]).cloned());
    host.ok_or_else(|| {
        let hosts: Vec<String> = pool.hosts.iter().map(ToString::to_string).collect();
        let text = format!("`{}` is not a server of this pool, which has {}", server.escape_debug(), hosts.join(", "));
        fail(OpenErrorKind::Unsuitable, text)
    })
}

fn hear_left(input: &[u8]) -> Heard<()> {
    match answer::Answer::decode(input).map_err(other)? {
        None => Ok(None),
        Some((answer::Answer { body: AnswerBody::Leave, .. }, bytes)) => Ok(Some(((), bytes))),
        Some(_) => Err(fail(OpenErrorKind::Protocol, "it answers what was not asked: use the same version on both")),
    }
}
