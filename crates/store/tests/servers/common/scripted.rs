//! A memory server whose answers a test makes.

use std::io::{Read, Write};
use std::net::TcpListener;

use spillway_wire::VERSION;
use spillway_wire::answer::{Condition, To};
use spillway_wire::hello::{self, HELLO_BYTES, Transcript, Welcome};
use spillway_wire::request::Request;

/// Says welcome to whoever connects, with so large a window, and has `answer` write what is said to each request. Returns its port.
pub fn scripted(window_bytes: u32, mut answer: impl FnMut(&mut Vec<u8>, Request<'_>) + Send + 'static) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let welcome = Welcome {
        version: VERSION,
        batch_max: 64,
        window_bytes,
        lease_seconds: 60,
        heartbeat_seconds: 5,
        existed: true,
        capacity_pages: 1000,
        free_pages: 1000,
        incarnation: 1,
    };
    std::thread::spawn(move || {
        for mut socket in listener.incoming().flatten() {
            let (challenge, mut hello) = ([3; 32], [0; HELLO_BYTES]);
            let _ = socket.write_all(&hello::challenge(&challenge));
            if socket.read_exact(&mut hello).is_err() {
                continue;
            }
            let (mut out, mut input, mut buffer) = (Vec::new(), Vec::new(), [0; 64 << 10]);
            Transcript { token: b"", challenge: &challenge, hello: &hello }.welcome(&mut out, &welcome);
            while socket.write_all(&out).is_ok()
                && let Ok(count @ 1..) = socket.read(&mut buffer)
            {
                input.extend_from_slice(&buffer[..count]);
                out.clear();
                while let Ok(Some((request, len))) = Request::decode(&input) {
                    answer(&mut out, request);
                    input.drain(..len);
                }
            }
        }
    });
    port
}

/// To the request of this id, by a server that is well.
pub fn to(id: u32) -> To {
    To { id, condition: Condition { free_pages: 1000, ..Condition::default() } }
}
