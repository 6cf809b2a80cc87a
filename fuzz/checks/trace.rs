//! Whatever is given as a trace is read to its end, or refused; what was read is written and read as the same.

use spillway_study::references::{Does, References};
use spillway_study::trace::{Reader, Writer};

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
