//! What servers answer, and what follows from it.

use std::os::fd::AsFd;
use std::time::Instant;

use spillway_core::Page;

use super::evacuate::Carried;
use super::handles::{self, Handles, State};
use super::ops::{OpId, Ops, Stage};
use super::protocol::{Body, Item, Protocol, Refusal};
use super::refusals;
use super::requests::Asked;
use super::server::Link;
use super::{Remote, name_of};
use crate::hash::PageHash;
use crate::pool::OpenErrorKind;
use crate::{Completion, Handle, StoreError};
use spillway_codec::unpack;

impl<P: Protocol> Remote<P> {
    /// Receives from one server and acts on it, if there may be something to receive; an error ends the connection.
    pub(super) fn serve(
        &mut self,
        at: usize,
        now: Instant,
        done: &mut dyn FnMut(Completion<'_>),
    ) -> Result<(), Refusal> {
        if self.servers[at].is_ready() {
            if !self.servers[at].stirs {
                return Ok(());
            }
        } else if self.servers[at].advance(self.poller.as_fd(), name_of(at), now)? {
            self.write_down(at);
            self.give_up_forgotten(at, done);
        }
        let Self { servers, handles, ops, hash, scratch, declined, carriage, .. } = self;
        let server = &mut servers[at];
        let Link::Ready(connection) = &mut server.link else { return Ok(()) };
        // What came before an end counts.
        let received = connection.receive();
        let mut full = false;
        loop {
            let input = connection.input();
            let answer = server.protocol.answer(input).map_err(|malformed| other_protocol(malformed.0))?;
            let Some((answer, bytes)) = answer else {
                if input.len() >= P::ANSWER_BYTES_MAX {
                    return Err(other_protocol("answers are short"));
                }
                break;
            };
            server.heard = now;
            if let Some(condition) = answer.condition {
                server.condition = condition;
            }
            if let Body::Goodbye(why) = answer.body {
                return Err(why);
            }
            let nothing = || other_protocol("an answer to what was not asked");
            let items = server.requests.items(answer.id).ok_or_else(nothing)?;
            let pages = items.iter().filter(|item| !matches!(item, Asked::Free(_) | Asked::Stray(..))).count();
            if pages != answer.body.len() {
                return Err(other_protocol("an answer for each page"));
            }
            let mut body = answer.body;
            for asked in items {
                let item = if pages > 0 { body.next() } else { None };
                let carries =
                    matches!(*asked, Asked::Put(op) | Asked::Get(op) if ops.get_mut(op).is_some_and(|op| op.carries));
                match (*asked, item) {
                    (Asked::Put(op), Some(item @ (Item::Kept | Item::Full))) if carries => {
                        server.puts -= 1;
                        full |= item == Item::Full;
                        let what = if item == Item::Kept { Carried::Kept } else { Carried::Stays };
                        carriage.news.push((op, what));
                    }
                    (Asked::Get(op), Some(item @ (Item::Bytes(_) | Item::Zero | Item::Gone))) if carries => {
                        let page = verify(item, handles, ops, op, hash, scratch);
                        let read = page.is_ok_and(|page| ops.turn(op, page));
                        carriage.news.push((op, if read { Carried::Read } else { Carried::Stays }));
                    }
                    (Asked::Put(op), Some(Item::Kept)) => {
                        server.puts -= 1;
                        put_done(op, handles, ops, &mut server.leaving, done);
                    }
                    (Asked::Put(op), Some(Item::Full)) => {
                        full = true;
                        declined.push(op);
                    }
                    (Asked::Get(op), Some(item @ (Item::Bytes(_) | Item::Zero | Item::Gone))) => {
                        let page = verify(item, handles, ops, op, hash, scratch);
                        let handle = ops.get_mut(op).expect("it is under way").handle;
                        if handles.is_abandoned(handle) && carriage.has(ops, handle) {
                            ops.end(op);
                            let slot = handles.slot_mut(handle);
                            slot.state = if slot.state == State::Getting { State::Kept } else { slot.state };
                        } else {
                            got(op, page, handles, ops, &mut server.leaving, done);
                        }
                    }
                    (Asked::Stray(..), None) => {}
                    (Asked::Free(bits), None) => {
                        handles.recycle(Handle::from_bits(bits).expect("it was one"));
                    }
                    _ => return Err(other_protocol("an answer to what was asked")),
                }
            }
            server.requests.end(answer.id);
            connection.consume(bytes);
        }
        if full {
            server.note_full(now);
        }
        received.map_err(refusals::ended)
    }
}

/// The server has a page.
fn put_done(
    id: OpId,
    handles: &mut Handles,
    ops: &mut Ops,
    leaving: &mut handles::List,
    done: &mut dyn FnMut(Completion<'_>),
) {
    let handle = ops.get_mut(id).expect("it is under way").handle;
    ops.end(id);
    if handles.is_abandoned(handle) {
        handles.slot_mut(handle).state = State::Leaving;
        handles.push(leaving, handle);
    } else {
        handles.kept(handle);
        done(Completion::Put { handle, result: Ok(()) });
    }
}

/// The page that a server gave, if it is the one that was put.
fn verify<'a>(
    item: Item<'a>,
    handles: &Handles,
    ops: &mut Ops,
    id: OpId,
    hash: &PageHash,
    scratch: &'a mut Page,
) -> Result<&'a Page, StoreError> {
    let op = ops.get_mut(id).expect("it is under way");
    let wanted = handles.slot(op.handle).checksum;
    if op.stage == Stage::Given || handles.is_abandoned(op.handle) {
        return Err(StoreError::Lost);
    }
    let page: &Page = match item {
        Item::Bytes(bytes) => match <&Page>::try_from(bytes) {
            Ok(page) => page,
            Err(_) => {
                unpack(bytes, scratch).map_err(|_| StoreError::Corrupt)?;
                scratch
            }
        },
        Item::Zero => {
            scratch.fill(0);
            scratch
        }
        _ => return Err(StoreError::Lost),
    };
    if hash.of(page) == wanted { Ok(page) } else { Err(StoreError::Corrupt) }
}

/// A get was answered.
fn got(
    id: OpId,
    page: Result<&Page, StoreError>,
    handles: &mut Handles,
    ops: &mut Ops,
    leaving: &mut handles::List,
    done: &mut dyn FnMut(Completion<'_>),
) {
    let op = *ops.get_mut(id).expect("it is under way");
    ops.end(id);
    if op.stage == Stage::Given {
        return;
    }
    if handles.is_abandoned(op.handle) {
        handles.slot_mut(op.handle).state = State::Leaving;
        handles.push(leaving, op.handle);
    } else {
        handles.slot_mut(op.handle).state = if page.is_ok() { State::Kept } else { State::Lost };
        done(Completion::Got { handle: op.handle, page });
    }
}

fn other_protocol(expected: &str) -> Refusal {
    let text = format!("it speaks another protocol (expected: {expected}): check the scheme and the port");
    (OpenErrorKind::Protocol, text)
}
