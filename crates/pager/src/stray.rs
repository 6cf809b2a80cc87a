//! Agents that nobody has heard of: their pager was killed between their first step and its own record of them. Nothing of their process
//! had been registered by then, so all of it is there.

use spillway_core::book::tells_of_all_targets;

use crate::adopt;
use crate::error::Error;
use crate::estate::Estate;
use crate::guardian::Named;
use crate::remains::{agent_of, living_pager, vault_of};

/// Ends an agent of `pid` that is a stray; without one, or where somebody else may still hear of it, nothing is done.
///
/// # Errors
/// When the process has ended, or somebody else traces it.
pub fn end(pid: i32) -> Result<(), Error> {
    let Some(thread) = agent_of(pid) else { return Ok(()) };
    // One without belongs to a pager that cannot be outlived.
    let Some(Ok(vault)) = vault_of(pid, thread) else { return Ok(()) };
    let estate = Estate::new(vault);
    let ourselves = std::process::id().cast_signed();
    let may_be_asked = living_pager(&estate).is_some_and(|pager| pager != ourselves);
    if may_be_asked || is_named(&estate, pid, thread) || !tells_of_all_targets(&estate.vault().lasting()) {
        return Ok(());
    }
    adopt::end_stray(pid, thread)?;
    if estate.pager().0 != ourselves && estate.targets().is_empty() && estate.young().is_empty() {
        estate.guardian().into_iter().for_each(Named::end);
    }
    Ok(())
}

fn is_named(estate: &Estate, pid: i32, thread: i32) -> bool {
    estate.targets().iter().any(|found| found.pid == pid && found.thread == thread)
}
