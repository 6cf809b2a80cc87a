//! Whatever a client sends over the life of a connection, the server answers in frames that a client can read, keeps no
//! more than it may, and has nothing left when the client has gone.
//!
//! The first byte says how: bit 0, whether a right hello comes first; bit 1, whether the bytes arrive in pieces;
//! bit 2, whether tenants share pages; bit 3, whether pages are compressed.

use spillway_server::rehearsal::Stage;
use spillway_server::{Config, Dedupe};
use spillway_wire::answer::Answer;
use spillway_wire::hello::{CHALLENGE_BYTES, Hello, Reply, Transcript, Versions};

const CHALLENGE: [u8; 32] = [3; 32];
const SECRET: [u8; 16] = [5; 16];

/// Holds one input to it.
pub fn check(bytes: &[u8]) {
    let Some((how, bytes)) = bytes.split_first() else { return };
    let mut config = Config::new(([127, 0, 0, 1], 0).into(), 1 << 20);
    config.dedupe = if how & 4 == 0 { Dedupe::Tenant } else { Dedupe::Everyone };
    config.compress = how & 8 != 0;
    config.workers = 1;
    let Ok(stage) = Stage::new(config) else { return };
    let mut peer = stage.connect(CHALLENGE);
    assert_eq!(peer.feed(&[]).len(), CHALLENGE_BYTES);
    if how & 1 != 0 {
        let versions = Versions::default();
        let hello = Hello { versions, create: true, take_over: false, tenant: [1; 16], nonce: [2; 32] };
        let hello = hello.encode(b"", &SECRET, &CHALLENGE);
        let transcript = Transcript { token: b"", challenge: &CHALLENGE, hello: &hello };
        let sent = peer.feed(&hello);
        assert!(matches!(transcript.decode(&sent), Ok(Some((Reply::Welcome(_), len))) if len == sent.len()));
    }
    let step = if how & 2 != 0 { 7 } else { bytes.len().max(1) };
    let mut sent = Vec::new();
    for piece in bytes.chunks(step) {
        sent.extend(peer.feed(piece));
    }
    if how & 1 != 0 {
        let mut at = 0;
        while at < sent.len() {
            let (_, len) = Answer::decode(&sent[at..]).expect("what the server sends is well formed").expect("whole");
            at += len;
        }
    }
    drop(peer);
    assert!(stage.is_consistent());
}
