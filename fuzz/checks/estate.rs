//! What a pager has written down of itself and its targets, as another finds it: any words at all are told as something that can be used.

use std::collections::HashSet;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Mutex, OnceLock, PoisonError};

use spillway_core::PAGE_BYTES_U64;
use spillway_pager::estate::Estate;
use spillway_store::vault::Vault;

/// Calls in a batch, as many as pages may be on their way at a time.
const BATCH: u64 = 256;

static VAULT: OnceLock<Mutex<Vault>> = OnceLock::new();

/// Pairs of four bytes and eight: which word, and its value.
pub fn check(bytes: &[u8]) {
    let vault = VAULT.get_or_init(|| Mutex::new(Vault::create().expect("memory")));
    let vault = vault.lock().unwrap_or_else(PoisonError::into_inner);
    let words = vault.private();
    let pairs: Vec<(usize, u64)> = bytes
        .chunks_exact(12)
        .map(|pair| {
            let (at, value) = pair.split_at(4);
            let at = u32::from_le_bytes(at.try_into().expect("four bytes")) as usize % words.len();
            (at, u64::from_le_bytes(value.try_into().expect("eight bytes")))
        })
        .collect();
    pairs.iter().for_each(|&(at, value)| words[at].store(value, Relaxed));
    let estate = Estate::new(vault.clone());
    holds(&estate);
    pairs.iter().for_each(|&(at, _)| words[at].store(0, Relaxed));
}

fn holds(estate: &Estate) {
    let _ = (estate.pager(), estate.is_daemon(), estate.pool(), estate.settings(), estate.last_inbox());
    let _ = (estate.local(), estate.choice());
    for target in estate.targets() {
        let layout = [target.layout.staging, target.layout.control, target.layout.code];
        assert!(layout.iter().all(|at| at.0.is_multiple_of(PAGE_BYTES_U64) && at.0 < 1 << 47));
        assert!(target.share.min_pages <= target.share.max_pages && target.share.weight > 0);
        let Some(batch) = target.batch else { continue };
        assert!(batch.runs.iter().map(|run| run.pages).sum::<u64>() <= BATCH);
        assert!(batch.runs.iter().all(|run| run.pages > 0 && run.address.0.is_multiple_of(PAGE_BYTES_U64)));
    }
    for child in estate.young() {
        assert!(child.share.min_pages <= child.share.max_pages && child.share.weight > 0);
        assert!(child.number >= 0 && child.guardian.pid >= 0);
        let left = estate.left_of(child.id).expect("it is written down");
        assert!(left.batch.is_none_or(|batch| batch.runs.iter().map(|run| run.pages).sum::<u64>() <= BATCH));
    }
    let _ = estate.guardian();
    for commons in estate.commons() {
        assert!(commons.share.min_pages <= commons.share.max_pages && commons.share.weight > 0);
        let numbers: HashSet<usize> = commons.leaving.iter().map(|(number, ..)| *number).collect();
        assert!(numbers.len() == commons.leaving.len() && numbers.iter().all(|number| (*number as u64) < BATCH));
        assert!(commons.leaving.iter().all(|(_, page, buffer)| page.0 < 1 << 52 && buffer.0 < 1 << 12));
    }
    for removal in estate.removals() {
        assert!(removal.whole.intersect(removal.shown) == Some(removal.shown) && removal.shown.pages() > 0);
    }
}
