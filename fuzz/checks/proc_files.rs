//! Any other file of `/proc` that we read: numbers that are there, or nothing; a command's name never passes for a field.

use spillway_pager::merging::{Merged, parse_merged};
use spillway_pager::procfs::{Stat, parse_field, parse_idle, parse_last_ran, parse_limit, parse_stat, parse_statm};

/// Holds one input to it.
pub fn check(text: &str) {
    if let Some(stat) = parse_stat(text).filter(|stat| stat.state.is_ascii()) {
        assert_eq!(parse_stat(&line("name", stat)), Some(stat));
    }
    let (is_kernels, is_ending) = (true, false);
    let stat = Stat {
        state: b'S',
        parent: 7,
        user_ticks: 10,
        kernel_ticks: 20,
        threads: 4,
        started: 999,
        cpu: 1,
        exit_status: 3,
        is_kernels,
        is_ending,
    };
    assert_eq!(parse_stat(&line(text, stat)), Some(stat), "a command may be called anything");

    if let Some(size) = parse_statm(text) {
        let again = format!("{} {} 0", size.total_pages, size.anonymous_pages);
        assert_eq!(parse_statm(&again), Some(size));
    }
    if let Some(merged) = parse_merged(text) {
        let Merged { pages, profit_bytes } = merged;
        let again = format!("ksm_rmap_items 9\nksm_merging_pages {pages}\nksm_process_profit {profit_bytes}\n");
        assert_eq!(parse_merged(&again), Some(merged));
    }
    if let Some(ticks) = parse_idle(text) {
        assert_eq!(parse_idle(&format!("cpu  1 2 3 {ticks} 0")), Some(ticks));
    }
    for name in ["State", "TracerPid", "CapEff"] {
        if let Some(value) = parse_field(text, name) {
            assert!(value == value.trim() && text.contains(&value));
            assert_eq!(parse_field(&format!("Name:\tx\n{name}:\t{value}\n"), name), Some(value));
        }
    }
    if let Some(limit) = parse_limit(text, "Max locked memory") {
        assert!(!limit.is_empty() && !limit.contains(|c: char| c.is_ascii_whitespace()));
    }
    assert!(parse_last_ran(text).is_none_or(f64::is_finite));
}

/// A line of `/proc/PID/stat`: proc_pid_stat(5).
fn line(command: &str, of: Stat) -> String {
    let Stat { state, parent, user_ticks, kernel_ticks, threads, started, cpu, exit_status, is_kernels, is_ending } =
        of;
    let code = u32::from(exit_status) << 8;
    let state = char::from(state);
    let flags = 0x0040_0040 | if is_kernels { 0x4000 } else { 0 } | if is_ending { 4 } else { 0 };
    format!(
        "42 ({command}) {state} {parent} 42 42 0 -1 {flags} 1 0 0 0 {user_ticks} {kernel_ticks} 0 0 20 0 {threads} 0 {started} 0 0 0 0 0 0 0 0 0 0 0 0 0 \
         0 0 17 {cpu} 0 0 0 0 0 0 0 0 0 0 0 0 {code}"
    )
}
