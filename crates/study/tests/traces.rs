//! Trace files: what is written is read, and what is broken is found out.

use proptest::prelude::*;
use spillway_study::error::Error;
use spillway_study::record::{Access, Fault, Record, What};
use spillway_study::trace::{Header, Reader, Writer};

const HEADER: Header = Header { window_ns: 100_000_000, budget_pages: 4096 };

fn record() -> impl Strategy<Value = (u64, What)> {
    let page = 0..1_u64 << 51;
    let pages = 1..1_u64 << 40;
    let fault = (page.clone(), 0..3_usize, 0..3_usize, 0..1_u64 << 40).prop_map(|(page, fault, access, service_ns)| {
        let fault = [Fault::FirstTouch, Fault::Refault, Fault::Fetch][fault];
        let access = [Access::Unknown, Access::Read, Access::Write][access];
        What::Fault { page, fault, access, service_ns }
    });
    let what = prop_oneof![
        8 => fault,
        2 => (page.clone(), pages.clone()).prop_map(|(page, pages)| What::Evicted { page, pages }),
        1 => (page, pages).prop_map(|(page, pages)| What::Removed { page, pages }),
        1 => Just(What::Window),
        1 => (0..1_u64 << 50).prop_map(|count| What::Dropped { count }),
    ];
    (0..1_u64 << 40, what)
}

fn written(records: &[Record], flush_every: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut writer = Writer::new(&mut bytes, HEADER).expect("a header");
    for (i, record) in records.iter().enumerate() {
        writer.push(record).expect("written");
        if i % flush_every == 0 {
            writer.flush().expect("flushed");
        }
    }
    writer.flush().expect("flushed");
    bytes
}

fn read(bytes: &[u8]) -> Result<(Vec<Record>, bool), Error> {
    let mut reader = Reader::new(bytes)?.expect("a trace");
    assert_eq!(reader.header(), HEADER);
    let mut records = Vec::new();
    while let Some(record) = reader.next_record()? {
        records.push(record);
    }
    Ok((records, reader.is_truncated()))
}

fn in_order(steps: Vec<(u64, What)>) -> Vec<Record> {
    let mut time_ns = 0;
    let timed = steps.into_iter().map(|(passed, what)| {
        time_ns += passed;
        Record { time_ns, what }
    });
    let mut records: Vec<Record> = timed.collect();
    records.push(Record { time_ns, what: What::End });
    records
}

proptest! {
    #[test]
    fn what_is_written_is_read(steps in proptest::collection::vec(record(), 0..300), flush_every in 1_usize..400) {
        let records = in_order(steps);
        let (back, truncated) = read(&written(&records, flush_every)).expect("whole");
        prop_assert_eq!(back, records);
        prop_assert!(!truncated);
    }

    #[test]
    fn what_is_cut_off_is_read_as_far_as_it_goes(steps in proptest::collection::vec(record(), 1..100), cut in 1_usize..) {
        let records = in_order(steps);
        let bytes = written(&records, 10);
        let cut = 40 + cut % (bytes.len() - 40);
        let (back, truncated) = read(&bytes[..cut]).expect("readable");
        prop_assert_eq!(&records[..back.len()], &back[..]);
        prop_assert!(truncated);
    }

    #[test]
    fn a_changed_byte_is_found_out(steps in proptest::collection::vec(record(), 1..50), at in 40_usize.., bits in 1_u8..) {
        let records = in_order(steps);
        let mut bytes = written(&records, 10);
        let at = 40 + at % (bytes.len() - 40);
        bytes[at] ^= bits;
        // A length that became longer than the file looks like a file that was cut off.
        match read(&bytes) {
            Err(Error::Garbled(_)) => {}
            Ok((back, truncated)) => prop_assert!(truncated && records.starts_with(&back)),
            Err(error) => prop_assert!(false, "{error}"),
        }
    }
}

#[test]
fn long_traces_are_written_in_frames_of_bounded_length() {
    let what = What::Evicted { page: 1 << 50, pages: 1 << 39 };
    let records: Vec<Record> = (0..50_000).map(|i| Record { time_ns: i << 20, what }).collect();
    let bytes = written(&records, usize::MAX);
    assert!(bytes.len() > 10 * spillway_study::trace::FRAME_BYTES_MAX / 2);
    assert_eq!(read(&bytes).expect("whole").0, records);
}

#[test]
fn other_files_and_versions_are_told_apart() {
    assert!(Reader::new(&b"0x1000 R\n"[..]).expect("readable").is_none());
    assert!(Reader::new(&b""[..]).expect("readable").is_none());
    let good = written(&[], 1);
    let mut newer = good.clone();
    newer[8] = 2;
    assert!(matches!(Reader::new(&newer[..]), Err(Error::Version(2))));
    let mut garbled = good.clone();
    garbled[20] ^= 1;
    assert!(matches!(Reader::new(&garbled[..]), Err(Error::Garbled(0))));
    assert!(matches!(Reader::new(&good[..30]), Err(Error::Garbled(0))));
}
