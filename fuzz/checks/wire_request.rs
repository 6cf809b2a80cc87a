//! Whatever a client sends is a request, the beginning of one, or refused; what is one is made of what it says.

use spillway_wire::request::{self, PutPage, Range, Request, RequestBody};
use spillway_wire::{FREE_PAGES_MAX, Key, frame};

/// Holds one input to it.
pub fn check(bytes: &[u8]) {
    let expected = request::frame_bytes(bytes);
    match Request::decode(bytes) {
        Err(_) => {}
        Ok(None) => assert!(expected.is_ok_and(|len| len > bytes.len() && len <= frame::FRAME_BYTES_MAX)),
        Ok(Some((request, len))) => {
            assert_eq!(expected, Ok(len));
            let mut again = Vec::new();
            match request.body {
                RequestBody::Put(puts) => {
                    let puts: Vec<PutPage<'_>> = puts.collect();
                    request::put(&mut again, request.id, &puts);
                }
                RequestBody::Get(class, keys) => {
                    let keys: Vec<Key> = keys.collect();
                    request::get(&mut again, request.id, class, &keys);
                }
                RequestBody::Free(ranges) => {
                    let ranges: Vec<Range> = ranges.collect();
                    assert!(ranges.iter().map(|range| u64::from(range.pages)).sum::<u64>() <= FREE_PAGES_MAX.into());
                    request::free(&mut again, request.id, &ranges);
                }
                RequestBody::Status => request::status(&mut again, request.id),
                RequestBody::Heartbeat => request::heartbeat(&mut again, request.id),
                RequestBody::Leave(leaves) => request::leave(&mut again, request.id, leaves),
            }
            assert_eq!(again, bytes[..len]);
        }
    }
}
