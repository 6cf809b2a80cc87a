//! A session without a socket.

use std::num::NonZeroU32;
use std::sync::mpsc;

use spillway_core::PAGE_BYTES;
use spillway_wire::Content;
use spillway_wire::hello::{Hello, Versions};
use spillway_wire::request::{PutPage, Range};

use super::*;
use crate::config::{Config, Limits, SpillConfig};
use crate::keeper::{Keeper, send_away};
use crate::server::prepare;
use crate::worker::Inbox;

const FIRST: Key = Key { region: 1, index: 0 };

/// A server with a spill file, and a window of so many pages.
fn shared(name: &str, window_pages: usize) -> Arc<Shared> {
    let path = std::env::temp_dir().join(format!("spillway-session-{name}-{}", std::process::id()));
    let mut config = Config::new(([127, 0, 0, 1], 0).into(), 4 << 20);
    config.spill = Some(SpillConfig { path, bytes: 1 << 20 });
    config.limits = Limits { window_bytes: window_pages * PAGE_BYTES, ..Limits::default() };
    Arc::new(prepare(config).unwrap())
}

/// A connection of the one tenant; whatever it says is taken.
fn open(shared: &Shared) -> Session {
    let challenge = [3; 32];
    let hello =
        Hello { versions: Versions::default(), create: true, take_over: false, tenant: [1; 16], nonce: [9; 32] };
    let mut session = Session::new(challenge, shared);
    ask(&mut session, shared, &hello.encode(b"", &[1; 16], &challenge));
    assert!(session.is_open());
    session
}

/// One turn with these bytes: how many were done with, and the gets that were parked.
fn ask(session: &mut Session, shared: &Shared, bytes: &[u8]) -> (usize, Vec<Parked>) {
    let mut work = Work::default();
    let mut cx = Context::new(shared, &mut work, Instant::now());
    let done = session.input(bytes, &mut cx);
    session.output.clear(&shared.pool);
    (done, cx.parked)
}

/// Puts pages one by one and sends each to the file.
fn put_away(session: &mut Session, shared: &Shared, pages: u32) {
    for index in 0..pages {
        let (mut page, mut frame) = ([7; PAGE_BYTES], Vec::new());
        page[..4].copy_from_slice(&index.to_le_bytes());
        let key = Key { index, ..FIRST };
        let put = PutPage { key, checksum: spillway_wire::checksum(&page), content: Content::Bytes(&page) };
        request::put(&mut frame, 0, &[put]);
        ask(session, shared, &frame);
        let number = NonZeroU32::new(index + 1).unwrap();
        // Twice, as the first time finds it used.
        assert!([(); 2].map(|()| send_away(&shared.pool, [number]).is_ok_and(|moved| moved == 1))[1]);
    }
}

fn spilled(shared: &Shared) -> u64 {
    shared.pool.spill.as_ref().map_or(0, |spill| spill.pages())
}

#[test]
fn a_turn_ends_when_many_keys_were_touched() {
    let shared = shared("turn", 1024);
    let mut session = open(&shared);
    let (mut frees, mut halves) = (Vec::new(), Vec::new());
    request::free(&mut frees, 1, &[Range { first: FIRST, pages: FREE_PAGES_MAX }]);
    request::free(&mut halves, 1, &[Range { first: FIRST, pages: FREE_PAGES_MAX / 2 }]);
    let (whole, half) = (frees.repeat(3), halves.repeat(3));
    for (bytes, done) in [(&whole[..], frees.len()), (&half[..], 2 * halves.len())] {
        assert_eq!((ask(&mut session, &shared, bytes).0, session.is_behind()), (done, true));
    }
    assert_eq!((ask(&mut session, &shared, &frees).0, session.is_behind()), (frees.len(), false));
    // Many small requests are one turn, and the beginning of one is left to be completed.
    let mut small = Vec::new();
    (0..100).for_each(|id| request::heartbeat(&mut small, id));
    small.extend_from_slice(&frees[..5]);
    assert_eq!((ask(&mut session, &shared, &small).0, session.is_behind()), (small.len() - 5, false));
    let mut statuses = Vec::new();
    (0..1000).for_each(|id| request::status(&mut statuses, id));
    assert!(ask(&mut session, &shared, &statuses).0 < statuses.len() && session.is_behind());
    session.end(Code::Silent, &shared);
    assert!(!session.is_behind());
    session.close(&shared);
}

#[test]
fn nothing_is_read_for_a_connection_that_has_ended() {
    let (to_keeper, gets) = mpsc::channel();
    let shared = shared("ended", 1024);
    let mut keeper = Keeper::new(Arc::clone(&shared), gets);
    let inbox = Arc::new(Inbox::new().unwrap());
    let mut session = open(&shared);
    put_away(&mut session, &shared, 1);
    let (mut get, mut free) = (Vec::new(), Vec::new());
    request::get(&mut get, 1, Class::Demand, &[FIRST]);
    request::free(&mut free, 2, &[Range { first: FIRST, pages: 1 }]);
    let (_, mut parked) = ask(&mut session, &shared, &get);
    ask(&mut session, &shared, &free);
    let mut parked = parked.pop().unwrap();
    parked.back = Some((Arc::clone(&inbox), 2));
    session.close(&shared);
    to_keeper.send(parked).unwrap();
    assert_eq!(spilled(&shared), 1, "the get holds it");
    assert!(keeper.turn());
    // Had it been read, it would be in the inbox.
    assert_eq!(spilled(&shared), 0);
}

#[test]
fn connections_of_a_tenant_share_a_window_of_gets_that_wait_for_the_file() {
    const WINDOW: u32 = 4;
    let shared = shared("window", WINDOW as usize);
    let (mut one, mut two) = (open(&shared), open(&shared));
    put_away(&mut one, &shared, WINDOW);
    let mut gets = Vec::new();
    for index in 0..WINDOW {
        request::get(&mut gets, index, Class::Demand, &[Key { index, ..FIRST }]);
    }
    let (done, first) = ask(&mut one, &shared, &gets);
    assert_eq!((done, first.len()), (gets.len(), WINDOW as usize));
    // One at a time, or nothing would wake it.
    let each = gets.len() / WINDOW as usize;
    let (done, mut second) = ask(&mut two, &shared, &gets);
    assert_eq!((done, second.len()), (each, 1));
    assert!(ask(&mut two, &shared, &gets[each..]).1.is_empty());
    two.resume(second.remove(0), &shared);
    two.output.clear(&shared.pool);
    second = ask(&mut two, &shared, &gets[each..]).1;
    assert_eq!(second.len(), 1);
    first.into_iter().for_each(|parked| one.resume(parked, &shared));
    let (done, rest) = ask(&mut two, &shared, &gets[2 * each..]);
    assert_eq!((done, rest.len()), (2 * each, 2));
    // However they end, they count no more.
    second.into_iter().chain(rest).for_each(|parked| parked.discard(&shared.pool));
    let Phase::Open(seat) = &two.phase else { panic!() };
    assert_eq!(seat.tenant.parked_bytes(), 0);
    [one, two].into_iter().for_each(|session| session.close(&shared));
}
