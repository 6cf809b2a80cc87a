//! What the kernel writes to who reads a userfaultfd: `struct uffd_msg` of `include/uapi/linux/userfaultfd.h`.
//!
//! Nothing here panics or acts, whatever the bytes: a descriptor stays a number.

use spillway_core::{Address, Span};

/// Messages read at once. One read costs about as much as ten messages in it.
pub const MESSAGES: usize = 16;

/// `struct uffd_msg`, as the kernel writes it.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug, Default)]
pub struct Message {
    event: u8,
    reserved: [u8; 7],
    arguments: [u64; 3],
}

const _: () = assert!(size_of::<Message>() == 32);

/// What a message tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Told {
    /// A thread waits for a page.
    Fault {
        /// Where.
        address: Address,
        /// Which thread, as the pager sees thread ids.
        thread: i32,
        /// Whether it means to write.
        write: bool,
        /// Whether the page is there, and protected from writes.
        protected: bool,
    },
    /// The address space was duplicated.
    Fork {
        /// The child's userfaultfd in our table, not negative.
        fd: i32,
    },
    /// A mapping moved.
    Remap {
        /// From here.
        from: Address,
        /// To here.
        to: Address,
        /// So many bytes.
        bytes: u64,
    },
    /// `madvise` is about to drop pages.
    Remove(Span),
    /// A mapping is gone.
    Unmap(Span),
    /// An event of a newer kernel, or nonsense.
    Unknown,
}

impl Message {
    /// From its words.
    pub fn from_words([first, a, b, c]: [u64; 4]) -> Self {
        let [event, reserved @ ..] = first.to_ne_bytes();
        Self { event, reserved, arguments: [a, b, c] }
    }

    /// Whether it tells of a fault, and not of a change.
    pub fn is_fault(&self) -> bool {
        self.event == 0x12
    }

    /// What it tells.
    pub fn told(&self) -> Told {
        let [a, b, c] = self.arguments;
        let span = Span { start: Address(a), end: Address(b) };
        match self.event {
            0x12 => {
                let (write, protected) = (a & 1 != 0, a & 2 != 0);
                Told::Fault { address: Address(b), thread: low_half(c), write, protected }
            }
            0x13 if low_half(a) >= 0 => Told::Fork { fd: low_half(a) },
            0x14 => Told::Remap { from: Address(a), to: Address(b), bytes: c },
            0x15 => Told::Remove(span),
            0x16 => Told::Unmap(span),
            _ => Told::Unknown,
        }
    }
}

/// The member of a union that is half as wide.
fn low_half(word: u64) -> i32 {
    let [b0, b1, b2, b3, ..] = word.to_ne_bytes();
    i32::from_ne_bytes([b0, b1, b2, b3])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(event: u8, arguments: [u64; 3]) -> Message {
        Message { event, reserved: [0xff; 7], arguments }
    }

    #[test]
    fn each_event_has_its_own_arguments() {
        let span = Span { start: Address(0x1000), end: Address(0x3000) };
        let high = 0xdead_beef_0000_0000;
        for (event, arguments, told) in [
            (
                0x12,
                [1, 0x5000, high | 42],
                Told::Fault { address: Address(0x5000), thread: 42, write: true, protected: false },
            ),
            (0x12, [0, 0x5000, 7], Told::Fault { address: Address(0x5000), thread: 7, write: false, protected: false }),
            (0x12, [3, 0x5000, 7], Told::Fault { address: Address(0x5000), thread: 7, write: true, protected: true }),
            (0x13, [high | 9, 0, 0], Told::Fork { fd: 9 }),
            (0x13, [0xffff_ffff, 0, 0], Told::Unknown),
            (0x14, [0x1000, 0x8000, 0x2000], Told::Remap { from: Address(0x1000), to: Address(0x8000), bytes: 0x2000 }),
            (0x15, [0x1000, 0x3000, 0], Told::Remove(span)),
            (0x16, [0x1000, 0x3000, 0], Told::Unmap(span)),
            (0, [0; 3], Told::Unknown),
            (0x17, [1; 3], Told::Unknown),
        ] {
            assert_eq!(message(event, arguments).told(), told);
            assert_eq!(message(event, arguments).is_fault(), matches!(told, Told::Fault { .. }));
        }
    }
}
