//! `spillway doctor`: what this machine lacks, what that costs, and the command that mends it.

use crate::failure::{FAILED, Failure};
use crate::say;
use spillway_pager::Check;

/// What `spillway doctor` is given.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The checks, as a JSON array
    #[arg(long)]
    json: bool,
}

/// Prints the checks; the exit status is 0 when all is well.
pub(crate) fn doctor(args: &Args) -> Result<u8, Failure> {
    let mut checks = spillway_pager::doctor();
    for check in &mut checks {
        check.found = say::plain(&check.found);
    }
    let text = if args.json {
        serde_json::to_string_pretty(&checks).map_err(|error| Failure::new(FAILED, error.to_string()))? + "\n"
    } else {
        table(&checks)
    };
    say::print(&text)?;
    Ok(if checks.iter().all(|check| check.ok) { 0 } else { FAILED })
}

fn table(checks: &[Check]) -> String {
    let width = checks.iter().map(|check| check.name.len()).max().unwrap_or(0);
    let mut text = String::new();
    for Check { name, ok, found, cost, remedy } in checks {
        let mark = if *ok { "ok" } else { "--" };
        text += &format!("{mark}  {name:<width$}  {found}\n");
        for (label, line) in [("costs", cost), ("remedy", remedy)] {
            if !*ok && !line.is_empty() {
                text += &format!("    {:<width$}  {label}: {line}\n", "");
            }
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_amiss_comes_with_its_remedy() {
        let check = |name, ok, remedy: &str| Check {
            name,
            ok,
            found: "found".into(),
            cost: "much".into(),
            remedy: remedy.into(),
        };
        let text = table(&[
            check("kernel", true, "none"),
            check("userfaultfd", false, "sysctl x=1"),
            check("ptrace", false, ""),
        ]);
        assert_eq!(
            text,
            "ok  kernel       found\n\
             --  userfaultfd  found\n                 costs: much\n                 remedy: sysctl x=1\n\
             --  ptrace       found\n                 costs: much\n"
        );
    }
}
