//! Proofs hold on the connection that they were made for, and nowhere else.

use spillway_wire::auth::Secret;
use spillway_wire::hello::{self, Code, HELLO_BYTES, Hello, Nonce, Received, Reply, Transcript, Versions, Welcome};

const TOKEN: &[u8] = b"a token of the server";
const SECRET: Secret = *b"tenant's secret.";
const CHALLENGE: Nonce = [5; 32];

const HELLO: Hello =
    Hello { versions: Versions { min: 1, max: 1 }, create: true, take_over: false, tenant: [7; 16], nonce: [9; 32] };

const WELCOME: Welcome = Welcome {
    version: 1,
    batch_max: 64,
    window_bytes: 1 << 20,
    lease_seconds: 60,
    heartbeat_seconds: 5,
    existed: true,
    capacity_pages: 1 << 30,
    free_pages: 12,
    incarnation: u64::MAX,
};

fn receive(bytes: &[u8; HELLO_BYTES]) -> Received {
    Received::decode(bytes).expect("a hello")
}

#[test]
fn a_hello_arrives_with_its_secret_sealed() {
    let bytes = HELLO.encode(TOKEN, &SECRET, &CHALLENGE);
    let received = receive(&bytes);
    assert_eq!(received.hello, HELLO);
    assert!(received.knows_token(TOKEN, &CHALLENGE) && received.knows_secret(&SECRET, &CHALLENGE));
    assert_eq!(received.new_secret(TOKEN, &CHALLENGE), Some(SECRET));
    for secret in [TOKEN, &SECRET[..]] {
        assert!(!bytes.windows(secret.len()).any(|window| window == secret));
    }
}

#[test]
fn a_recorded_hello_proves_nothing_under_another_challenge() {
    let received = receive(&HELLO.encode(TOKEN, &SECRET, &CHALLENGE));
    let other = [6; 32];
    assert!(!received.knows_token(TOKEN, &other));
    assert!(!received.knows_secret(&SECRET, &other));
    assert_eq!(received.new_secret(TOKEN, &other), None);
}

#[test]
fn any_changed_bit_of_a_hello_is_noticed() {
    let bytes = HELLO.encode(TOKEN, &SECRET, &CHALLENGE);
    for at in 0..HELLO_BYTES * 8 {
        let mut bytes = bytes;
        bytes[at / 8] ^= 1 << (at % 8);
        let Ok(received) = Received::decode(&bytes) else { continue };
        let proven = received.knows_token(TOKEN, &CHALLENGE) && received.knows_secret(&SECRET, &CHALLENGE);
        assert!(!proven, "bit {at}");
    }
}

#[test]
fn a_wrong_token_or_secret_fails() {
    let received = receive(&HELLO.encode(b"another", &SECRET, &CHALLENGE));
    assert!(!received.knows_token(TOKEN, &CHALLENGE));
    assert_eq!(received.new_secret(TOKEN, &CHALLENGE), None);
    assert!(!received.knows_secret(&[0; 16], &CHALLENGE));
    let reconnecting = Hello { create: false, ..HELLO };
    let received = receive(&reconnecting.encode(TOKEN, &SECRET, &CHALLENGE));
    assert_eq!(received.new_secret(TOKEN, &CHALLENGE), None);
    assert!(received.knows_secret(&SECRET, &CHALLENGE));
}

#[test]
fn the_welcome_is_from_a_server_that_knows_the_token() {
    let hello = HELLO.encode(TOKEN, &SECRET, &CHALLENGE);
    let transcript = Transcript { token: TOKEN, challenge: &CHALLENGE, hello: &hello };
    let mut bytes = Vec::new();
    transcript.welcome(&mut bytes, &WELCOME);
    for end in 0..bytes.len() {
        assert_eq!(transcript.decode(&bytes[..end]), Ok(None));
    }
    assert_eq!(transcript.decode(&bytes), Ok(Some((Reply::Welcome(WELCOME), bytes.len()))));
    for at in 0..bytes.len() * 8 {
        let mut bytes = bytes.clone();
        bytes[at / 8] ^= 1 << (at % 8);
        assert!(!matches!(transcript.decode(&bytes), Ok(Some((Reply::Welcome(_), _)))), "bit {at}");
    }
    for transcript in [Transcript { token: b"", ..transcript }, Transcript { challenge: &[0; 32], ..transcript }] {
        assert!(transcript.decode(&bytes).is_err());
    }
}

#[test]
fn refusals_and_versions() {
    let hello = HELLO.encode(b"", &SECRET, &CHALLENGE);
    let transcript = Transcript { token: b"", challenge: &CHALLENGE, hello: &hello };
    let mut bytes = Vec::new();
    hello::refusal(&mut bytes, Code::Token, &Code::Token.to_string());
    let Ok(Some((Reply::Refusal { code: Code::Token, text }, len))) = transcript.decode(&bytes) else { panic!() };
    assert_eq!((text, len), (&Code::Token.to_string()[..], bytes.len()));
    for (min, max, common) in
        [(0, 0, None), (0, 1, Some(1)), (1, u16::MAX, Some(2)), (2, 2, Some(2)), (3, u16::MAX, None)]
    {
        assert_eq!(Versions { min, max }.common(), common);
    }
    assert_eq!(hello::decode_challenge(&hello::challenge(&CHALLENGE)), Ok(CHALLENGE));
    assert!(hello::decode_challenge(&[0; 40]).is_err());
    let mut backwards = hello;
    backwards[8] = 2;
    assert!(Received::decode(&backwards).is_err());
}
