//! What a virtual machine monitor says of its guest's memory: regions that can be, each once, or a line that says why not.

use spillway_core::PAGE_BYTES_U64;
use spillway_pager::handed::parse;

/// Holds one input to it.
pub fn check(bytes: &[u8]) {
    let regions = match parse(bytes) {
        Ok(regions) => regions,
        Err(refusal) => {
            let line = refusal.to_string();
            assert!(!line.is_empty() && !line.contains('\n'), "{line}");
            return;
        }
    };
    assert!((1..=256).contains(&regions.len()));
    let mut free_from = 0;
    for region in &regions {
        let (start, end) = (region.span.start.0, region.span.end.0);
        assert!(start > 0 && start >= free_from && start < end && end < 1 << 47);
        assert!([start, end, region.offset].iter().all(|at| at.is_multiple_of(PAGE_BYTES_U64)));
        assert!(region.offset.checked_add(end - start).is_some());
        free_from = end;
    }
    let again: Vec<String> = regions
        .iter()
        .map(|region| {
            let (start, size, offset) = (region.span.start.0, region.span.end.0 - region.span.start.0, region.offset);
            format!(r#"{{"offset":{offset},"size":{size},"base_host_virt_addr":{start}}}"#)
        })
        .collect();
    assert_eq!(parse(format!("[{}]", again.join(",")).as_bytes()).expect("it was taken before"), regions);
}
