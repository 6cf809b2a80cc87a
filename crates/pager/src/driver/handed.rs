//! Memory that was handed over with its userfaultfd: pages that are in the store before anything of it was touched.

use std::sync::Arc;

use spillway_core::shares::Share;
use spillway_core::{Span, TargetId};
use spillway_store::Handle;

use super::Driver;
use super::hands::to_bits;
use crate::sys::uffd::Uffd;
use crate::tally::Tally;
use crate::target::Target;

impl Driver {
    /// A target that has made its userfaultfd itself. Its messages are read once it is known where its pages are.
    pub(super) fn hand(&mut self, pid: i32, uffd: Uffd, tally: Arc<Tally>, share: Share) -> TargetId {
        let id = self.core.add_target();
        self.core.assign(id, tally.tree, share);
        self.add(Target { handed: true, inherits: false, ..Target::new(id, pid, uffd, None, tally) });
        id
    }

    /// What is missing in `span` is in the store, page after page from `first` on.
    pub(super) fn lay_out(&mut self, target: TargetId, span: Span, first: Handle) {
        let handle = |pages: u64| {
            let bits = u64::from(first.bits()) + pages;
            let handle = u32::try_from(bits).ok().and_then(Handle::from_bits);
            to_bits(handle.expect("an image has a handle for each of its pages"))
        };
        self.core.laid_out(target, span, |address| handle(address.pages_since(span.start)));
    }
}
