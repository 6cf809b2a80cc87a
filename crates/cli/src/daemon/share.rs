//! What a target may have of local memory, from what users write.

use super::of_host;
use crate::local;
use crate::request::ShareText;
use spillway_core::{PAGE_BYTES_U64, size::parse_bytes};
use spillway_pager::{Local, Share};

/// The most that a weight can be: a thousand times that of whoever asks for none.
const WEIGHT_MAX: u32 = 100_000;

/// What of a share changes: all of it, or nothing where a part is wrong.
pub(crate) fn change(wanted: &ShareText) -> Result<impl Fn(&mut Share) + use<>, String> {
    let pages = |text: &String| -> Result<u64, String> {
        // Nothing may be promised; the least that one can run in is not for a minimum.
        if parse_bytes(text) == Ok(0) {
            return Ok(0);
        }
        match local::parse(text).and_then(of_host).map_err(|failure| failure.to_string())? {
            Local::Bytes(bytes) => Ok(bytes / PAGE_BYTES_U64),
            _ => Ok(u64::MAX),
        }
    };
    let min = wanted.min.as_ref().map(pages).transpose()?;
    if min == Some(u64::MAX) {
        return Err("a minimum of `all` leaves nothing for others: give a size, such as 512M".into());
    }
    let max = wanted.max.as_ref().map(pages).transpose()?;
    if max == Some(0) {
        return Err("nothing runs in no memory: give a maximum of at least 4.0 MiB, or detach the process".into());
    }
    let weight = wanted.weight;
    if let Some(weight) = weight.filter(|weight| !(1..=WEIGHT_MAX).contains(weight)) {
        return Err(format!("`{weight}` is no weight: give 1 to {WEIGHT_MAX}; whoever asks for none has 100"));
    }
    Ok(move |share: &mut Share| {
        share.min_pages = min.unwrap_or(share.min_pages);
        share.max_pages = max.unwrap_or(share.max_pages);
        share.weight = weight.unwrap_or(share.weight);
    })
}

/// Keys of `spillway set` that are about one target.
pub(crate) const KEYS: [&str; 3] = ["min", "max", "weight"];

/// Reads `KEY=VALUE` pairs of those keys; none if there is none of them.
pub(crate) fn read(pairs: &[String]) -> Result<Option<ShareText>, String> {
    let mut text = ShareText::default();
    let mut any = false;
    for (key, value) in pairs.iter().filter_map(|pair| pair.split_once('=')) {
        match key {
            "min" => text.min = Some(value.into()),
            "max" => text.max = Some(value.into()),
            "weight" => {
                let weight =
                    value.parse().map_err(|_| format!("`{}` is no weight: give a number", value.escape_debug()))?;
                text.weight = Some(weight);
            }
            _ => continue,
        }
        any = true;
    }
    change(&text).map(|_| any.then_some(text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_changes_and_nothing_else() {
        let pairs = |text: &[&str]| text.iter().map(|&pair| pair.to_owned()).collect::<Vec<_>>();
        let mut share = Share { min_pages: 7, max_pages: 9, weight: 3 };
        let text = read(&pairs(&["min=0", "weight=500"])).expect("read").expect("some");
        change(&text).expect("right")(&mut share);
        assert_eq!(share, Share { min_pages: 0, max_pages: 9, weight: 500 });
        let text = read(&pairs(&["min=8M", "max=all"])).expect("read").expect("some");
        change(&text).expect("right")(&mut share);
        assert_eq!(share, Share { min_pages: 2048, max_pages: u64::MAX, weight: 500 });
        assert_eq!(read(&pairs(&["policy=lru", "nonsense"])), Ok(None));
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        for pair in
            ["min=all", "min=1K", "max=0", "max=x", "weight=0", "weight=-1", "weight=many", "weight=100001", "max="]
        {
            let why = read(&[pair.to_owned()]).expect_err(pair);
            assert!(why.contains(": "), "{pair}: {why}");
        }
    }
}
