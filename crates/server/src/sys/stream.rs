//! Copying pages past the caches.

use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};
use std::ptr::NonNull;

use spillway_core::{PAGE_BYTES, Page};

const AT_ONCE: usize = size_of::<__m128i>();

/// Copies a page to where nobody reads it soon. A plain copy would fetch each line from memory just to write over it, and push others out
/// of the caches. Whoever sees what this thread writes afterwards sees the page.
///
/// # Safety
/// At `to` there is room for a page, aligned to 16 bytes, which nobody else reads or writes meanwhile.
pub(super) unsafe fn copy(page: &Page, to: NonNull<u8>) {
    assert_eq!(to.align_offset(AT_ONCE), 0, "aligned as the stores need it");
    let (from, to) = (page.as_ptr().cast::<__m128i>(), to.as_ptr().cast::<__m128i>());
    for at in 0..PAGE_BYTES / AT_ONCE {
        // SAFETY: `at` is within both pages; loads need no alignment, stores have it, and the caller has the room to itself.
        unsafe { _mm_stream_si128(to.add(at), _mm_loadu_si128(from.add(at))) };
    }
    // Such stores are ordered with no others but by this: what is published next must not be seen before them.
    // SAFETY: every x86-64 CPU has SSE.
    unsafe { _mm_sfence() };
}
