//! Shares of local memory: which tree of processes gives pages up next, and how many it may be asked for.
//!
//! - Whoever is above its maximum pays first, also while the whole is within its budget; for room of its own, and so whatever its
//!   minimum is.
//! - Then pays who has the most pages above its minimum for its weight: shares per page, and the client that pays least for
//!   its pages loses one (min-funding revocation; Waldspurger, "Memory Resource Management in VMware ESX Server", OSDI 2002,
//!   section 5.1).
//! - The minimum is a promise: nobody at or below his own pays while anyone is above hers, not even while she cannot. Only
//!   when nobody is above do all pay, by weight.

/// What a tree may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// Pages that are not taken from it for others.
    pub min_pages: u64,
    /// Pages that it never has more of.
    pub max_pages: u64,
    /// What its pages above the minimum are worth, beside those of others: at least 1.
    pub weight: u32,
}

impl Default for Share {
    fn default() -> Self {
        Self { min_pages: 0, max_pages: u64::MAX, weight: Self::WEIGHT }
    }
}

impl Share {
    /// The weight of whoever asks for none.
    pub const WEIGHT: u32 = 100;
}

/// A tree, as far as it matters who pays.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Claim {
    /// What it may have.
    pub share: Share,
    /// What it has.
    pub pages: u64,
    /// Whether pages can be taken from it now.
    pub pays: bool,
}

impl Claim {
    /// Pages above the maximum.
    pub fn excess(&self) -> u64 {
        self.pages.saturating_sub(self.share.max_pages)
    }

    /// Pages above the minimum.
    pub fn spare(&self) -> u64 {
        self.pages.saturating_sub(self.share.min_pages)
    }
}

/// Who pays next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Payer {
    /// Which claim.
    pub at: usize,
    /// No more pages than this.
    pub most_pages: u64,
}

/// Who pays next: among those above their maximum, or else, where the whole is `short`, among all. None when nobody must, or
/// whoever must cannot now. `near` is how close to its maximum a tree counts as above it: so that pages leave in batches before
/// its faults have to wait.
pub fn payer(
    claims: &(impl Iterator<Item = Claim> + Clone),
    short: bool,
    near: impl Fn(&Share) -> u64,
) -> Option<Payer> {
    let over = |claim: &Claim| claim.pages.saturating_sub(claim.share.max_pages.saturating_sub(near(&claim.share)));
    let all = || claims.clone().enumerate();
    if all().any(|(_, claim)| over(&claim) > 0) {
        let most = dearest(all(), over);
        if most.is_some() || !short {
            return most;
        }
    }
    if !short {
        return None;
    }
    if all().any(|(_, claim)| claim.spare() > 0) {
        return dearest(all(), Claim::spare);
    }
    dearest(all(), |claim| claim.pages)
}

/// Of those that can pay, who has the most `pages` for its weight; the first of several.
fn dearest(claims: impl Iterator<Item = (usize, Claim)>, pages: impl Fn(&Claim) -> u64) -> Option<Payer> {
    let mut found: Option<(usize, u64, u32)> = None;
    for (at, claim) in claims.filter(|(_, claim)| claim.pays) {
        let (has, weight) = (pages(&claim), claim.share.weight.max(1));
        let dearer = |(_, most, its): (usize, u64, u32)| {
            u128::from(has) * u128::from(its) > u128::from(most) * u128::from(weight)
        };
        if has > 0 && found.is_none_or(dearer) {
            found = Some((at, has, weight));
        }
    }
    found.map(|(at, most_pages, _)| Payer { at, most_pages })
}

/// Pages that a fault of a tree may still make local, of `room` that everyone has: not beyond its maximum, and not the last
/// `kept` pages while it is above its minimum and someone else below his.
pub fn room(claim: Claim, others_below: bool, room: u64, kept: u64) -> u64 {
    let room = if others_below && claim.pages >= claim.share.min_pages { room.saturating_sub(kept) } else { room };
    room.min(claim.share.max_pages.saturating_sub(claim.pages))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The rules said slowly: pages are taken one by one, each from whoever the sentences above name.
    fn slow(claims: &[Claim], short: bool) -> Option<usize> {
        let worth = |pages: u64, claim: &Claim| pages as f64 / f64::from(claim.share.weight);
        let best = |pages: &dyn Fn(&Claim) -> u64| {
            let mut best: Option<usize> = None;
            for (at, claim) in claims.iter().enumerate() {
                let better = |other: usize| worth(pages(claim), claim) > worth(pages(&claims[other]), &claims[other]);
                if claim.pays && pages(claim) > 0 && best.is_none_or(better) {
                    best = Some(at);
                }
            }
            best
        };
        let over: Vec<bool> = claims.iter().map(|it| it.pages > it.share.max_pages).collect();
        if over.contains(&true) {
            let found = best(&Claim::excess);
            if found.is_some() || !short {
                return found;
            }
        }
        if !short {
            return None;
        }
        let above = claims.iter().any(|it| it.pages > it.share.min_pages);
        if above { best(&Claim::spare) } else { best(&|it| it.pages) }
    }

    struct Lots(u64);

    impl Lots {
        fn below(&mut self, end: u64) -> u64 {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            self.0 % end
        }
    }

    #[test]
    fn who_pays_is_who_the_rules_name() {
        let mut lots = Lots(0x2545_F491_4F6C_DD1D);
        for _ in 0..200_000 {
            let claims: Vec<Claim> = (0..lots.below(6))
                .map(|_| {
                    let min_pages = lots.below(3) * lots.below(20);
                    let max_pages = if lots.below(2) == 0 { u64::MAX } else { min_pages + lots.below(20) };
                    let weight = [1, 50, 100, 100, 700][usize::try_from(lots.below(5)).expect("small")];
                    let share = Share { min_pages, max_pages, weight };
                    Claim { share, pages: lots.below(60), pays: lots.below(4) > 0 }
                })
                .collect();
            let short = lots.below(2) == 0;
            let found = payer(&claims.iter().copied(), short, |_| 0);
            assert_eq!(found.map(|it| it.at), slow(&claims, short), "{claims:?} {short}");
            let Some(Payer { at, most_pages }) = found else { continue };
            let paid = Claim { pages: claims[at].pages - most_pages, ..claims[at] };
            let anyone_above = claims.iter().any(|it| it.spare() > 0);
            // The promise: after all of it has left, it still has its minimum, unless nobody had more than that.
            assert!(!anyone_above || paid.pages >= paid.share.min_pages, "{claims:?}");
            assert!(claims[at].pays && (short || claims[at].excess() > 0));
        }
    }

    /// Taken page by page, what is left stands in proportion to weight above the minima.
    #[test]
    fn what_is_left_is_as_the_weights_are() {
        let share = |min_pages, weight| Share { min_pages, weight, ..Share::default() };
        let mut claims = [share(100, 100), share(0, 300), share(50, 100)];
        let mut pages = [1000_u64; 3];
        while pages.iter().sum::<u64>() > 1150 {
            let all = claims.iter().zip(&pages).map(|(&share, &pages)| Claim { share, pages, pays: true });
            pages[payer(&all, true, |_| 0).expect("someone pays").at] -= 1;
        }
        assert!(pages[0].abs_diff(300) <= 2 && pages[1].abs_diff(600) <= 2 && pages[2].abs_diff(250) <= 2, "{pages:?}");
        // One that is asked for more than there is above the minima takes from all.
        claims.iter_mut().for_each(|share| share.min_pages = 1000);
        let all = claims.iter().zip(&pages).map(|(&share, &pages)| Claim { share, pages, pays: true });
        assert!(payer(&all, true, |_| 0).is_some());
    }

    #[test]
    fn who_cannot_pay_is_waited_for() {
        let claim = |min_pages, pages, pays| Claim { share: Share { min_pages, ..Share::default() }, pages, pays };
        let claims = [claim(10, 10, true), claim(10, 11, false)];
        assert_eq!(payer(&claims.iter().copied(), true, |_| 0), None);
        let claims = [claim(10, 10, true), claim(10, 11, true)];
        assert_eq!(payer(&claims.iter().copied(), true, |_| 0), Some(Payer { at: 1, most_pages: 1 }));
    }

    #[test]
    fn room_ends_at_the_maximum_and_before_what_is_kept_for_others() {
        let share = Share { min_pages: 10, max_pages: 20, ..Share::default() };
        let claim = |pages| Claim { share, pages, pays: true };
        assert_eq!(room(claim(5), true, 100, 8), 15);
        assert_eq!(room(claim(15), true, 9, 8), 1);
        assert_eq!(room(claim(15), false, 9, 8), 5);
        assert_eq!(room(claim(25), false, 9, 8), 0);
        assert_eq!(room(claim(5), true, 4, 8), 4);
    }
}
