//! Any message of a userfaultfd: the kernel's layout, byte for byte, and no descriptor that cannot be one.

use spillway_core::{Address, Span};

#[path = "../../crates/pager/src/sys/message.rs"]
#[allow(dead_code, reason = "its tests are the pager's")]
mod message;
use message::{Message, Told};

/// Holds one input to it: messages, one after another, as a read gives them.
pub fn check(bytes: &[u8]) {
    for bytes in bytes.chunks_exact(size_of::<Message>()) {
        let message = read(bytes);
        let word = |at: usize| u64::from_ne_bytes(bytes[at..at + 8].try_into().unwrap());
        let half = |at: usize| i32::from_ne_bytes(bytes[at..at + 4].try_into().unwrap());
        let span = Span { start: Address(word(8)), end: Address(word(16)) };
        let told = message.told();
        assert_eq!(message.is_fault(), matches!(told, Told::Fault { .. }));
        match told {
            Told::Fault { address, thread, write, protected } => {
                assert_eq!((bytes[0], address.0, thread), (0x12, word(16), half(24)));
                assert_eq!((write, protected), (bytes[8] & 1 == 1, bytes[8] & 2 == 2));
            }
            Told::Fork { fd } => assert!(bytes[0] == 0x13 && fd == half(8) && fd >= 0),
            Told::Remap { from, to, bytes: length } => {
                assert_eq!((bytes[0], from.0, to.0, length), (0x14, word(8), word(16), word(24)));
            }
            Told::Remove(removed) => assert!(bytes[0] == 0x15 && removed == span),
            Told::Unmap(unmapped) => assert!(bytes[0] == 0x16 && unmapped == span),
            Told::Unknown => assert!(!(0x12..=0x16).contains(&bytes[0]) || bytes[0] == 0x13 && half(8) < 0),
        }
    }
}

fn read(bytes: &[u8]) -> Message {
    assert_eq!(bytes.len(), size_of::<Message>());
    // SAFETY: as many bytes are there as are read, at any alignment, and any bytes make a Message.
    unsafe { bytes.as_ptr().cast::<Message>().read_unaligned() }
}
