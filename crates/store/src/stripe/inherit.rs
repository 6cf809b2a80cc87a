//! Taking over what another process has left: pages, rows and chunks, as far as someone refers to them.
//!
//! What is believed: where a page is, which rows are written, and which chunks a row has. All else follows, or counts as not having
//! happened. Whoever takes over may be killed as well, so what is found stays as it was until it is known to be of no use.
//!
//! | the dead was killed after | and before | then |
//! |---|---|---|
//! | chunks were kept | their row was written | no row has them: they are freed; whoever put the pages has them still |
//! | a row was written | a page's place said so | nobody is there: the place before counts, or the page is put again |
//! | a page had left | its row knew | pages tell where they are; rows are told |
//! | a row was no more | its chunks were freed | no row has them: they are freed |
//! | a chunk was rebuilt | its row had it | the row has the one before; the new one is freed |

#[cfg(test)]
use super::Mutation;
use super::members::Members;
use super::table::{Pages, Rows, State, use_of_pages, use_of_rows};
use super::{Shape, Stripes};
use crate::vault::{Use, Vault};
use crate::{Handle, Inheritance};

/// The pages and rows that another process has left in the vault. No page has a reference yet.
fn find(shape: Shape, vault: &Vault) -> (Pages, Rows) {
    let (mut pages, mut rows) = (Pages::found(vault), Rows::found(shape.width(), vault));
    // Last first, so that the first are given first.
    for row in rows.all().rev() {
        rows.take(row, shape.data);
    }
    for nth in (0..pages.len()).rev() {
        let handle = pages.nth(nth);
        let place = pages.take(handle);
        if !place.is_some_and(|place| rows.settle(place)) {
            pages.remove(handle);
        }
    }
    (pages, rows)
}

/// Gives up pages without references, and rows without pages. Which chunks there are is `inherit`'s to say; each is asked for once.
fn settle(pages: &mut Pages, rows: &mut Rows, shape: Shape, mut inherit: impl FnMut(Handle) -> bool) {
    for nth in (0..pages.len()).rev() {
        let handle = pages.nth(nth);
        if let Some(place) = pages.unnamed(handle) {
            rows.hole(place);
            pages.remove(handle);
        }
    }
    for row in rows.all().rev() {
        if !rows.is_written(row) {
            continue;
        }
        if rows.live(row) == 0 {
            rows.remove(row);
            continue;
        }
        for position in shape.positions() {
            let Some(chunk) = rows.chunk(row, position) else { continue };
            let used = shape.used(rows.length(row)).any(|used| used == position);
            if !used || !inherit(chunk) {
                rows.set_chunk(row, position, None);
            }
        }
    }
}

impl Stripes {
    /// Over members that have been taken over, too.
    pub(crate) fn take_over(members: Box<dyn Members>, shape: Shape, vault: &Vault) -> Self {
        let (pages, rows) = find(shape, vault);
        Self::with(members, shape, pages, rows)
    }
}

impl Inheritance for Stripes {
    fn has(&self, handle: Handle) -> bool {
        self.core.pages.has(handle)
    }

    fn count(&mut self, handle: Handle) {
        self.core.pages.count(handle);
    }

    fn all_counted(&mut self) {
        let Self { members, core } = self;
        #[cfg(test)]
        if core.is_wrong(Mutation::KeepUnnamed) {
            let all = (0..core.pages.len()).map(|nth| core.pages.nth(nth));
            let unnamed: Vec<Handle> = all.filter(|handle| core.pages.unnamed(*handle).is_some()).collect();
            unnamed.into_iter().for_each(|handle| core.pages.count(handle));
        }
        settle(&mut core.pages, &mut core.rows, core.shape, |chunk| members.inherit(chunk));
        #[cfg(test)]
        let strays = core.is_wrong(Mutation::KeepStrays);
        #[cfg(not(test))]
        let strays = false;
        if !strays {
            members.inherit_no_more();
        }
        for row in core.rows.all() {
            if core.rows.is_written(row) {
                core.counts.groups += 1;
                core.upkeep.count_new(core.rows.lives(row));
            }
        }
        let now = members.now();
        core.upkeep.awake(now);
        core.look_by(now);
        members.wake_at(core.next_look, now);
    }
}

/// What rows and pages are kept in.
pub(crate) fn uses(shape: Shape) -> [Use; 2] {
    [use_of_rows(shape.width()), use_of_pages()]
}

/// Takes over what the vault has, with every second page referred to and every second chunk there; how many pages and rows that
/// leaves. What the fuzz target for it calls.
pub(crate) fn rehearse(shape: Shape, vault: &Vault) -> (usize, usize) {
    let (mut pages, mut rows) = find(shape, vault);
    let counted: Vec<Handle> = (0..pages.len()).step_by(2).map(|nth| pages.nth(nth)).collect();
    let counted: Vec<Handle> = counted.into_iter().filter(|handle| pages.has(*handle)).collect();
    counted.iter().for_each(|handle| pages.count(*handle));
    settle(&mut pages, &mut rows, shape, |chunk| chunk.bits().is_multiple_of(2));
    let written = |rows: &Rows| rows.all().filter(|row| rows.is_written(*row)).collect::<Vec<u32>>();
    let left = written(&rows);
    let lives: u32 = left.iter().map(|row| rows.live(*row).count_ones()).sum();
    assert_eq!(lives as usize, counted.len(), "each page lives at a place of its own");
    let chunks = left.iter().flat_map(|row| shape.positions().filter_map(|at| rows.chunk(*row, at)));
    assert!(chunks.into_iter().all(|chunk| chunk.bits().is_multiple_of(2)), "no row has a chunk that is not there");
    for _ in 0..4 {
        let (page, row) = (pages.insert().expect("there is room"), rows.insert().expect("there is room"));
        assert!(!counted.contains(&page) && !left.contains(&row), "it is taken");
        assert!(shape.positions().all(|at| rows.chunk(row, at).is_none()), "a new row has no chunks");
    }
    for handle in &counted {
        let State::Kept(place, None) = pages.held(*handle) else { panic!("it was kept") };
        if rows.hole(place) == 0 {
            rows.remove(place.row);
        }
        assert!(pages.release(*handle), "it had one reference");
        pages.remove(*handle);
    }
    assert!(written(&rows).is_empty(), "a row without pages goes");
    (counted.len(), left.len())
}
