//! What a virtual machine monitor says of its guest's memory: regions that can be, each once, or a line that says why not.

use spillway_core::PAGE_BYTES_U64;
use spillway_pager::handed::{HandOff, Message, Refusal, Region, parse};

/// Holds one input to it.
pub fn check(bytes: &[u8]) {
    match parse(bytes) {
        Ok(Message::Regions(regions)) => {
            are_possible(&regions);
            let again = told(&regions, "base_host_virt_addr", "offset");
            assert_eq!(parse(again.as_bytes()).expect("it was taken before"), Message::Regions(regions));
        }
        Ok(Message::HandOff(HandOff { pid, regions, length })) => {
            are_possible(&regions);
            assert!(length <= bytes.len());
            let regions_again = told(&regions, "host_virt_addr", "backing_file_offset");
            let body = format!(r#"{{"type":"handoff","vmm_pid":{pid},"mode":"MISSING|WP","regions":{regions_again}}}"#);
            let mut again = u32::try_from(body.len()).expect("a few regions").to_le_bytes().to_vec();
            again.extend_from_slice(body.as_bytes());
            let length = again.len();
            assert_eq!(parse(&again).expect("it was taken"), Message::HandOff(HandOff { pid, regions, length }));
        }
        Err(refusal) => is_a_line(&refusal),
    }
}

/// Why it was refused is said in one line.
pub fn is_a_line(refusal: &Refusal) {
    let line = refusal.to_string();
    assert!(!line.is_empty() && !line.contains('\n'), "{line}");
}

fn are_possible(regions: &[Region]) {
    assert!((1..=256).contains(&regions.len()));
    let mut free_from = 0;
    for region in regions {
        is_possible(region);
        assert!(region.span.start.0 >= free_from);
        free_from = region.span.end.0;
    }
}

/// Memory that a process may have.
pub fn is_possible(region: &Region) {
    let (start, end) = (region.span.start.0, region.span.end.0);
    assert!(start > 0 && start < end && end < 1 << 47);
    assert!([start, end, region.offset].iter().all(|at| at.is_multiple_of(PAGE_BYTES_U64)));
    assert!(region.offset.checked_add(end - start).is_some());
}

fn told(regions: &[Region], address: &str, offset: &str) -> String {
    let one = |region: &Region| {
        let (start, size) = (region.span.start.0, region.span.end.0 - region.span.start.0);
        format!(r#"{{"{offset}":{},"size":{size},"{address}":{start}}}"#, region.offset)
    };
    format!("[{}]", regions.iter().map(one).collect::<Vec<_>>().join(","))
}
