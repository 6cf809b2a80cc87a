//! Which members the chunks of a row go to: each to another, and in different domains as far as there are enough.
//!
//! What fails together is a domain. Where the pool has as many as a row has chunks, no two chunks of it go to one, and rows are
//! rather shorter while domains are away. Where it has fewer, chunks are spread over them as evenly as can be. Only a chunk that
//! is lost is made again in a domain that has one of its row already, and only where no other takes it.

use std::time::Instant;

#[cfg(test)]
use super::Mutation;
use super::fills::Fill;
use super::members::{Members, Presence};
use super::{Core, Shape, WIDTH_MAX};
use crate::StoreError;

/// Members for a row.
pub(super) struct Layout {
    pub(super) data: u8,
    pub(super) parity: u8,
    pub(super) members: [u8; WIDTH_MAX],
}

/// A member that would take a chunk, those first that had better.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Candidate {
    no_room: bool,
    busy: u32,
    tie: u16,
    member: u8,
    domain: u8,
}

/// How many of something are in each domain.
struct Domains {
    of: [u8; 256],
    /// Domains that have any.
    used: usize,
    /// The most that are in one.
    most: u8,
}

impl Domains {
    fn new() -> Self {
        Self { of: [0; 256], used: 0, most: 0 }
    }

    fn add(&mut self, domain: u8) {
        let of = &mut self.of[usize::from(domain)];
        self.used += usize::from(*of == 0);
        *of += 1;
        self.most = self.most.max(*of);
    }

    fn of(&self, domain: u8) -> u8 {
        self.of[usize::from(domain)]
    }
}

/// So many of the candidates, spread over domains as evenly as can be; in each, the first ones.
fn pick(order: &[Candidate], count: usize) -> [Candidate; WIDTH_MAX] {
    let mut picked = [Candidate::default(); WIDTH_MAX];
    let mut domains = Domains::new();
    let mut taken = [false; 256];
    let (mut next, mut share) = (0, 0);
    assert!(count <= order.len(), "there are as many candidates");
    while next < count {
        for candidate in order {
            let taken = &mut taken[usize::from(candidate.member)];
            if next < count && !*taken && domains.of(candidate.domain) == share {
                *taken = true;
                domains.add(candidate.domain);
                picked[next] = *candidate;
                next += 1;
            }
        }
        share += 1;
    }
    picked
}

impl Core {
    fn domain(&self, members: &dyn Members, member: u8, now: Instant) -> u8 {
        #[cfg(test)]
        if self.is_wrong(Mutation::ShareDomain) {
            return member;
        }
        members.health(member, now).domain
    }

    /// Which members a row may go to now: all it wants, or a shorter row; with less parity only as far as members are away.
    pub(super) fn lay_out(&self, members: &dyn Members, now: Instant, salt: u64) -> Result<Layout, StoreError> {
        let Shape { data, parity } = self.shape;
        let mut order = [Candidate::default(); 255];
        let (mut fit, mut ready, mut full, mut away) = (0, 0, 0, 0);
        let (mut domains, mut usable) = (Domains::new(), Domains::new());
        for suspected in [false, true] {
            let reached = if domains.used >= data + parity { usable.used } else { fit };
            if suspected && reached > parity {
                break;
            }
            for member in 0..members.count() {
                let health = members.health(member, now);
                let domain = self.domain(members, member, now);
                if !suspected && !health.is_retired() {
                    domains.add(domain);
                    ready += usize::from(health.ready);
                    full += usize::from(health.ready && !health.takes());
                    away += usize::from(!health.ready);
                }
                if health.takes() && self.watch.is_suspect(member, now) == suspected {
                    let busy = u32::from(health.load / 64) + u32::try_from(health.puts / 16).unwrap_or(u32::MAX / 2);
                    let mixed = (salt ^ u64::from(member)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
                    let tie = u16::try_from(mixed >> 48).expect("sixteen bits");
                    order[fit] = Candidate { no_room: !health.room, busy, tie, member, domain };
                    usable.add(domain);
                    fit += 1;
                }
            }
        }
        let order = &mut order[..fit];
        order.sort_unstable();
        let apart = domains.used >= data + parity && usable.used > parity;
        let fit = if apart { usable.used } else { fit };
        let (data, parity) = match fit {
            _ if fit >= data + parity => (data, parity),
            _ if fit > parity => (fit - parity, parity),
            0 => return Err(if ready > 0 && full == ready { StoreError::Full } else { StoreError::Unavailable }),
            _ if parity + 1 - fit <= away => (1, fit - 1),
            _ => return Err(if full > 0 { StoreError::Full } else { StoreError::Unavailable }),
        };
        let picked = pick(order, data + parity);
        let chosen = &picked[..data + parity];
        if chosen.iter().any(|candidate| candidate.no_room) {
            return Err(StoreError::Unavailable);
        }
        let mut by_position = [0; WIDTH_MAX];
        let positions = (0..data).chain(self.shape.data..self.shape.data + parity);
        // Which chunk goes where is by chance, or the fastest member would have all the data.
        let first = usize::try_from(salt >> 32).unwrap_or(0) % (data + parity);
        for (nth, position) in positions.enumerate() {
            by_position[position] = chosen[(first + nth) % (data + parity)].member;
        }
        let few = |count: usize| u8::try_from(count).expect("few");
        Ok(Layout { data: few(data), parity: few(parity), members: by_position })
    }

    /// One of the members that are free, to take the place of a chunk's in a row that is being written. Chunks that are apart
    /// stay so.
    pub(super) fn stand_in(
        &self,
        members: &dyn Members,
        fill: &Fill,
        position: u8,
        free: impl Fn(&u8) -> bool,
        now: Instant,
    ) -> Option<u8> {
        let (mut domains, mut others) = (Domains::new(), Domains::new());
        for at in fill.to_have(self.shape) {
            let domain = self.domain(members, fill.members[usize::from(at)], now);
            domains.add(domain);
            if at != position {
                others.add(domain);
            }
        }
        let share = |member: &u8| others.of(self.domain(members, *member, now));
        let fits = |member: &u8| free(member) && (domains.most > 1 || share(member) == 0);
        (0..members.count()).filter(fits).min_by_key(share)
    }

    /// Whether there is a member for a row's chunk, be it busy now.
    pub(super) fn has_place(&self, members: &dyn Members, row: u32, position: u8, now: Instant) -> bool {
        let others = self.others(members, row, position, now);
        (0..members.count()).any(|member| {
            let health = members.health(member, now);
            health.listed && !health.leaving && others.leave(member, self.domain(members, member, now))
        })
    }

    /// A member that could have a row's chunk: it has none of the others, and its domain as few as any that takes it.
    pub(super) fn spare(&self, members: &dyn Members, row: u32, position: u8, now: Instant) -> Option<u8> {
        let others = self.others(members, row, position, now);
        let domain = |member: u8| {
            #[cfg(test)]
            if self.is_wrong(Mutation::RebuildAnywhere) {
                return member;
            }
            self.domain(members, member, now)
        };
        let share = |member: &u8| others.domains.of(domain(*member));
        let takes = |member: &u8| members.health(*member, now).takes() && others.leave(*member, domain(*member));
        // One of these may be busy now; then it is waited for.
        let least = (0..members.count()).filter(takes).map(|member| share(&member)).min()?;
        let fits = |member: &u8| {
            takes(member)
                && share(member) == least
                && members.health(*member, now).room
                && !self.watch.is_suspect(*member, now)
        };
        (0..members.count()).filter(fits).min_by_key(|member| {
            let health = members.health(*member, now);
            (health.load / 64, health.puts, (u32::from(*member) + row) % 7)
        })
    }

    /// The row's chunks but one.
    fn others(&self, members: &dyn Members, row: u32, position: u8, now: Instant) -> Others {
        let (mut taken, mut domains) = ([false; 256], Domains::new());
        let mut own = None;
        for at in self.shape.used(self.rows.length(row)) {
            let Some(chunk) = self.rows.chunk(row, at) else { continue };
            let chunk = members.chunk(chunk, now);
            let domain = self.domain(members, chunk.member, now);
            if at == position {
                own = (chunk.presence == Presence::There).then_some(domain);
            } else if chunk.presence != Presence::Dead {
                // What is dead there is in nobody's way.
                taken[usize::from(chunk.member)] = true;
                domains.add(domain);
            }
        }
        let apart = domains.most <= 1 && own.is_some_and(|own| domains.of(own) == 0);
        Others { taken, domains, apart }
    }
}

/// Where the other chunks of a row are.
struct Others {
    taken: [bool; 256],
    domains: Domains,
    /// The chunk is there and in none of their domains: it only moves, and is to stay apart.
    apart: bool,
}

impl Others {
    /// Whether they leave a member, in a domain, to the chunk.
    fn leave(&self, member: u8, domain: u8) -> bool {
        !self.taken[usize::from(member)] && (!self.apart || self.domains.of(domain) == 0)
    }
}

/// What rows of this shape at members in these domains do not survive though there is parity enough, in a line for the user.
pub(crate) fn warning(shape: Shape, domains: &[&str]) -> Option<String> {
    let first = |domain: &str| domains.iter().position(|other| *other == domain);
    let candidate = |(member, domain): (usize, &&str)| {
        let number = |at: usize| u8::try_from(at).ok();
        Some(Candidate { member: number(member)?, domain: number(first(domain)?)?, ..Candidate::default() })
    };
    let order: Vec<Candidate> = domains.iter().enumerate().filter_map(candidate).collect();
    let count = shape.width().min(order.len());
    let mut shares = [0; 256];
    for candidate in &pick(&order, count)[..count] {
        shares[usize::from(candidate.domain)] += 1;
    }
    shares.sort_unstable_by(|one, other| other.cmp(one));
    if shares[0] <= 1 {
        return None;
    }
    let survived = (1..).take_while(|lost| shares[..*lost].iter().sum::<usize>() <= shape.parity).count();
    let all = order.iter().filter(|it| usize::from(it.member) == usize::from(it.domain)).count();
    let what = match (all, survived) {
        (1, _) => "losing it loses data".to_owned(),
        (_, 0) => "losing a domain loses data".to_owned(),
        (_, 1) => "losing one domain loses no data, losing two does".to_owned(),
        _ => unreachable!("two domains with two pieces each are more than any parity"),
    };
    let plural = if all == 1 { "" } else { "s" };
    Some(format!("groups of {} pieces over {all} domain{plural}: {what}", shape.width()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_are_spread_as_evenly_as_can_be() {
        // How many members each domain has, and chunks; the shares, largest first.
        for (domains, count, expected) in [
            (&[2, 2, 2, 2, 2][..], 5, &[1, 1, 1, 1, 1][..]),
            (&[5, 1, 1], 5, &[3, 1, 1]),
            (&[3, 3, 3], 5, &[2, 2, 1]),
            (&[4, 4], 6, &[3, 3]),
            (&[9], 3, &[3]),
            (&[1, 9, 1, 1], 4, &[1, 1, 1, 1]),
        ] {
            let mut order = Vec::new();
            for (domain, members) in (0..).zip(domains) {
                for _ in 0..*members {
                    let member = u8::try_from(order.len()).unwrap();
                    order.push(Candidate { member, domain, ..Candidate::default() });
                }
            }
            let picked = &pick(&order, count)[..count];
            let mut members: Vec<u8> = picked.iter().map(|candidate| candidate.member).collect();
            members.sort_unstable();
            members.dedup();
            assert_eq!(members.len(), count, "each is another");
            let mut shares: Vec<usize> = (0..u8::try_from(domains.len()).unwrap())
                .map(|domain| picked.iter().filter(|candidate| candidate.domain == domain).count())
                .collect();
            shares.sort_unstable_by(|one, other| other.cmp(one));
            assert_eq!(shares, expected, "{domains:?}");
        }
    }

    #[test]
    fn what_is_not_survived_is_said() {
        let warn = |data, parity, domains: &str| {
            let domains: Vec<&str> = domains.split_terminator(' ').collect();
            warning(Shape { data, parity }, &domains)
        };
        assert_eq!(warn(4, 1, ""), None);
        assert_eq!(warn(4, 1, "a b c d e"), None);
        assert_eq!(warn(4, 1, "a a b b c c d d e e"), None);
        for (data, parity, domains, line) in [
            (4, 1, "a b c a b c", "groups of 5 pieces over 3 domains: losing a domain loses data"),
            (4, 1, "a a a a a", "groups of 5 pieces over 1 domain: losing it loses data"),
            (
                4,
                2,
                "a b c a b c",
                "groups of 6 pieces over 3 domains: losing one domain loses no data, losing two does",
            ),
            (1, 1, "a a", "groups of 2 pieces over 1 domain: losing it loses data"),
            (1, 2, "a a b", "groups of 3 pieces over 2 domains: losing one domain loses no data, losing two does"),
        ] {
            assert_eq!(warn(data, parity, domains).as_deref(), Some(line));
        }
    }
}
