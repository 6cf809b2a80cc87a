//! Whatever is given as a trace is read to its end, or refused, and can be replayed if it is short; what was read is written
//! and read as the same.

use spillway_study::optimal::optimum;
use spillway_study::references::{Does, References};
use spillway_study::replay::{Block, Costs, Kind, LOCAL_PAGES_LEAST, Scheme, Setting, replay};
use spillway_study::trace::{Reader, Writer};

/// The most steps that are replayed: pages may lie far apart, and each costs a region then.
const STEPS: usize = 512;

/// Holds one input to it.
pub fn check(bytes: &[u8]) {
    let read = References::read(bytes, 1);
    if let Err(error) = &read {
        let line = error.to_string();
        assert!(!line.contains(char::is_control), "{line:?}");
    }
    if let Ok((references, _)) = read {
        let kept = references.steps().iter().filter(|step| step.does() != Does::Remove).count();
        assert!((1..=references.touches()).contains(&(kept as u64)));
        assert!(references.peak_pages() <= references.pages().into());
        assert_eq!(references.runs().iter().map(|(_, run)| run.len()).sum::<usize>(), references.pages() as usize);
        if references.steps().len() <= STEPS {
            let costs = Costs { link_ns: 4_000, fault_ns: 5_000, capture_ns: 1_000 };
            let best = optimum(&references, LOCAL_PAGES_LEAST);
            for policy in [Kind::Nru, Kind::S3Fifo] {
                let (scheme, block) = (Scheme::PreEvict, Block::Elastic);
                let setting = Setting { local_pages: LOCAL_PAGES_LEAST, policy, scheme, block, costs };
                let done = replay(&references, setting);
                assert!(done.fetched_pages + done.refaults >= best.misses, "{done:?} against {best:?}");
                assert!(done.prefetched_used_pages <= done.prefetched_pages, "{done:?}");
            }
        }
    }
    let Ok(Some(mut reader)) = Reader::new(bytes) else { return };
    let (mut records, mut again) = (Vec::new(), Vec::new());
    let mut writer = Writer::new(&mut again, reader.header()).expect("memory takes it");
    while let Ok(Some(record)) = reader.next_record() {
        writer.push(&record).expect("memory takes it");
        records.push(record);
    }
    writer.flush().expect("memory takes it");
    let mut reader = Reader::new(&again[..]).expect("our own").expect("our own");
    for record in records {
        assert_eq!(reader.next_record().expect("our own"), Some(record));
    }
    assert_eq!(reader.next_record().expect("our own"), None);
}
