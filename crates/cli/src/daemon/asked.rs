//! What is asked of a daemon, carried out.

use super::{Host, of_host, share};
use crate::failure::Failure;
use crate::local;
use crate::request::ShareText;
use crate::service::{Detachment, Paging, Service};
use serde_json::{Value, json};
use spillway_pager::Share;

const NO_DAEMON: &str = "this pager serves one program; only `spillway daemon` does that";
const ENDING: &str = "this daemon is letting its targets go";

impl<P: Paging> Service<P> {
    fn asked(&self) -> Result<&Host, String> {
        match (self.host(), self.detachment()) {
            (None, _) => Err(NO_DAEMON.into()),
            (Some(host), Detachment::None) => Ok(host),
            (Some(_), _) => Err(ENDING.into()),
        }
    }

    /// Manages a process with its descendants.
    pub(crate) fn adopt(
        &self,
        pid: i32,
        at_once: bool,
        front: i32,
        share_pages: bool,
        wanted: &ShareText,
    ) -> Result<Value, String> {
        let host = self.asked()?;
        let mut share = Share::default();
        share::change(wanted)?(&mut share);
        let adopted = self.pager().adopt_tree(pid, at_once, share, share_pages);
        // A `spillway run` asks again when it sees another daemon, which may have taken its program over.
        let known = self.pager().trees().into_iter().find(|tree| tree.root == pid && !tree.ended);
        if front == 0 || known.is_none() {
            adopted?;
        }
        if front > 0 {
            host.add_run(front, pid);
        }
        Ok(json!({ "adopt_pause_us": known.map_or(0.0, |tree| tree.adopt_pause_us) }))
    }

    /// Changes what one target may have of local memory.
    pub(crate) fn share(&self, pid: i32, wanted: &ShareText) -> Result<Value, String> {
        let pid = self.asked()?.program_of(pid);
        let change = share::change(wanted)?;
        self.pager().change_share(pid, &mut |share| change(share)).map(|()| json!({}))
    }

    /// Whether equal pages of a target and others are kept once in memory: of one, or of all that this pager serves alone.
    pub(crate) fn share_pages(&self, pid: i32, on: bool) -> Result<Value, String> {
        let whose = self.host().map(|_| self.asked().map(|host| host.program_of(pid))).transpose()?;
        self.pager().share_pages(whose, on).map(|()| json!({}))
    }

    /// Lets one target go.
    pub(crate) fn release(&self, pid: i32, progress: &mut dyn FnMut(u64, u64)) -> Result<(), String> {
        let pid = self.asked()?.program_of(pid);
        self.pager().release_tree(pid, progress)
    }

    /// The counters of one target, also a while after its end.
    pub(crate) fn show(&self, pid: i32) -> Result<Value, String> {
        let host = self.host().ok_or(NO_DAEMON)?;
        let pid = host.program_of(pid);
        // The last of several that had the same number.
        let tree = self.pager().trees().into_iter().rev().find(|tree| tree.root == pid || tree.pids.contains(&pid));
        let tree =
            tree.ok_or_else(|| format!("process {pid} is not managed here; `spillway ps` shows those that are"))?;
        serde_json::to_value(host.listing(tree)).map_err(|error| error.to_string())
    }

    /// The `spillway run` of this program stops itself, or goes on.
    pub(crate) fn pause(&self, pid: i32, now: bool) {
        self.host().into_iter().for_each(|host| host.pause(pid, now));
    }

    /// Lets all targets go; a daemon ends then.
    pub(crate) fn shut_down(&self, progress: &mut dyn FnMut(u64, u64)) -> Result<(), String> {
        self.asked()?;
        self.detach(progress)
    }

    /// Lets the one program go that this pager serves.
    pub(crate) fn detach_all(&self, progress: &mut dyn FnMut(u64, u64)) -> Result<(), String> {
        if self.host().is_some() {
            return Err("a daemon is asked to release one target, or to shut down".into());
        }
        self.detach(progress)
    }

    /// Changes the budget.
    pub(crate) fn resize_to(&self, text: &str) -> Result<(), Failure> {
        let local = local::parse_from(text, self.pager().choice().floor_bytes())?;
        if self.host().is_none() {
            self.set_local(local);
            return Ok(());
        }
        self.pager().resize(of_host(local)?).map_err(Failure::refused)
    }
}
