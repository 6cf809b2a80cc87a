//! LRU-3 of dcm (section 3.2): proactive, active and inactive queues.
//!
//! The inactive queue is the pager's buffers: pages that are out of the target and not yet in the store. One that is touched
//! there is promoted to the proactive queue. New pages enter the active queue, or, with a small probability, the
//! proactive one, so that a scan leaves something of itself behind. The proactive queue's oldest pages are demoted to the
//! active queue, whose oldest are the victims. dcm does not give the queues' sizes; see `PROACTIVE_PERCENT`.

use super::queues::{End, Queues};
use super::{Arrival, Pages, Policy, Refusal};
use crate::units::PageIndex;

const ACTIVE: usize = 0;
const PROACTIVE: usize = 1;

/// The most that the proactive queue may have of a target's pages: half, as the kernel's own active list.
const PROACTIVE_PERCENT: u64 = 50;

/// One new page in so many is promoted at once: dcm's epsilon, "a small random probability".
const EPSILON_OF: u64 = 32;

/// See the module's documentation.
pub struct Lru3 {
    queues: Queues,
    random: u64,
}

impl Default for Lru3 {
    fn default() -> Self {
        Self { queues: Queues::default(), random: 0x9E37_79B9_7F4A_7C15 }
    }
}

impl Lru3 {
    /// Xorshift: nobody depends on these numbers but the promotion.
    fn is_lucky(&mut self) -> bool {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random.is_multiple_of(EPSILON_OF)
    }
}

impl Policy for Lru3 {
    fn next(&mut self, _: &mut Pages<'_>) -> Option<PageIndex> {
        let queues = &mut self.queues;
        let all = queues.len(ACTIVE) + queues.len(PROACTIVE) + queues.out();
        while queues.len(PROACTIVE) * 100 > all * PROACTIVE_PERCENT {
            queues.turn_over(PROACTIVE, ACTIVE, 0);
        }
        queues.give_out_oldest(ACTIVE).or_else(|| queues.give_out_oldest(PROACTIVE))
    }

    fn queues(&self) -> Option<&Queues> {
        Some(&self.queues)
    }

    fn queues_mut(&mut self) -> Option<&mut Queues> {
        Some(&mut self.queues)
    }

    fn refused(&mut self, page: PageIndex, why: Refusal) {
        self.queues.refused(page, why, |queue| if queue == ACTIVE { PROACTIVE } else { ACTIVE });
    }

    fn arrived(&mut self, page: PageIndex, how: Arrival) {
        self.queues.remove(page);
        let promoted = match how {
            Arrival::Buffer => true,
            Arrival::Fault | Arrival::Store => self.is_lucky(),
            Arrival::Ahead | Arrival::Found => false,
        };
        self.queues.push(if promoted { PROACTIVE } else { ACTIVE }, End::Newest, page, 0);
    }

    fn stretched(&mut self, page: PageIndex) {
        self.queues.renew(page, ACTIVE);
    }
}
