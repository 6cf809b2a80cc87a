//! Where the chunks of rows are: in different domains where there are enough, and at servers that come while all goes on.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use super::model::{Model, Setting, Weather};
use super::servers::{DEADLINE, Server};
use crate::Urgency;
use crate::stripe::members::{Chunk, Presence};
use crate::stripe::{Mutation, Shape};

const FOUR_AND_ONE: Shape = Shape { data: 4, parity: 1 };

/// A pool with so many servers in each domain.
fn pool(shape: Shape, domains: usize, each: usize, seed: u64, mutation: Option<Mutation>) -> Model {
    let servers = domains * each;
    let weather = Weather::Survivable;
    let setting = Setting { shape, servers, entries: 200, steps: 0, weather, mutation, mortal: false };
    let model = Model::new(setting, seed);
    for (at, server) in model.world.lock().unwrap().servers.iter_mut().enumerate() {
        server.domain = u8::try_from(at % domains).unwrap();
    }
    model
}

impl Model {
    /// The chunks of each row; none for those that were never put.
    fn chunks_of_rows(&self) -> Vec<Vec<Option<Chunk>>> {
        let (core, now) = (&self.stripes.core, self.now());
        let rows = (0..u32::try_from(core.rows.len()).unwrap()).filter(|row| core.rows.is_written(*row));
        let chunk = |row, at| core.rows.chunk(row, at).map(|chunk| self.stripes.members.chunk(chunk, now));
        let chunks = |row| core.shape.used(core.rows.length(row)).map(|at| chunk(row, at)).collect();
        rows.map(chunks).collect()
    }

    /// The most chunks that any row has in one domain.
    fn crowding(&self) -> usize {
        let in_one = |chunks: &Vec<Option<Chunk>>| {
            let world = self.world.lock().unwrap();
            let alive = chunks.iter().flatten().filter(|it| !matches!(it.presence, Presence::Dead | Presence::Gone));
            let domains: Vec<u8> = alive.map(|it| world.servers[usize::from(it.member)].domain).collect();
            let count = |domain| domains.iter().filter(|other| **other == domain).count();
            domains.iter().map(|domain| count(*domain)).max().unwrap_or(0)
        };
        self.chunks_of_rows().iter().map(in_one).max().unwrap_or(0)
    }

    /// The chunks of the longest row.
    fn width(&self) -> usize {
        self.chunks_of_rows().iter().map(Vec::len).max().unwrap_or(0)
    }

    /// Whether no row misses anything.
    fn is_mended(&self) -> bool {
        let there = |chunk: &Option<Chunk>| chunk.is_some_and(|chunk| chunk.presence == Presence::There);
        self.chunks_of_rows().iter().flatten().all(there) && self.stripes.core.jobs.rebuilding == 0
    }

    /// These servers crash.
    fn crash(&self, is_lost: impl Fn(&Server) -> bool) {
        let mut world = self.world.lock().unwrap();
        for member in 0..world.servers.len() {
            if is_lost(&world.servers[member]) {
                world.cut(member, true);
            }
        }
    }

    fn wait(&mut self, time: Duration) {
        let until = self.now() + time;
        self.until("time passes", |model| model.now() >= until);
    }

    fn holds(&self, member: usize) -> usize {
        self.world.lock().unwrap().servers[member].kept.len()
    }

    fn rewrite(&mut self, entries: std::ops::Range<usize>) {
        entries.for_each(|at| self.put(at));
        self.fill();
    }
}

/// Servers and domains are lost and pages move, where there are as many domains as a row has chunks.
fn live_through(shape: Shape, seed: u64, mutation: Option<Mutation>) {
    let mut model = pool(shape, shape.width(), 2, seed, mutation);
    model.fill();
    assert_eq!((model.crowding(), model.width()), (1, shape.width()), "{shape:?}: as they are written");
    // What one server had is made again: in its domain there is another.
    model.crash(|server| server.domain == 0);
    model.world.lock().unwrap().mend(0);
    model.wait(DEADLINE);
    model.until("all is rebuilt", Model::is_mended);
    assert_eq!(model.crowding(), 1, "{shape:?}: as they are rebuilt");
    // Pages of rows that are mostly holes move.
    for at in (0..200).filter(|at| at % 4 > 0) {
        model.free(at);
    }
    let other = shape.width();
    model.world.lock().unwrap().mend(other);
    let moved = model.stripes.core.counts.moved_pages;
    model.until("pages move", |model| model.stripes.core.counts.moved_pages > moved + 10 || shape.data == 1);
    model.fill();
    model.until("all is there", Model::is_mended);
    assert_eq!(model.crowding(), 1, "{shape:?}: as they are moved");
    // A server goes, and is emptied.
    model.world.lock().unwrap().servers[1].leaving = true;
    model.until("it is empty", |model| model.holds(1) == 0);
    assert_eq!(model.crowding(), 1, "{shape:?}: as they leave");
    model.world.lock().unwrap().servers[1].leaving = false;
    // What is on its way to a domain that goes is made again in one that the row has already, as no other is left.
    model.until("nothing is being written", |model| model.stripes.core.fills.iter().all(|fill| fill.row.is_none()));
    model.crash(|server| server.domain == 2 % u8::try_from(shape.width()).unwrap());
    model.read_all();
    // What is written meanwhile takes shorter rows; where copies are all there is to a row, it has them all the same.
    let before = model.crowding();
    model.rewrite(0..100);
    let most = if shape.data > 1 { 1 } else { 2 };
    assert_eq!((before, model.crowding()), (1, most), "{shape:?}: while a domain is away");
    assert_eq!(model.stripes.core.counts.lost_pages, 0);
}

#[test]
fn chunks_of_a_row_are_in_different_domains() {
    for (data, parity) in [(4, 1), (2, 1), (1, 1), (2, 2), (1, 2)] {
        for seed in 1..40 {
            live_through(Shape { data, parity }, seed, None);
        }
    }
}

#[test]
fn nothing_is_lost_and_all_ends_whatever_shares_a_domain() {
    for seed in 0..40 {
        let shape = [FOUR_AND_ONE, Shape { data: 2, parity: 1 }, Shape { data: 2, parity: 2 }][seed % 3];
        let (servers, domains) = (shape.width() + 1 + seed % 4, 2 + seed % 6);
        let weather = Weather::Survivable;
        let mortal = seed % 2 == 1;
        let setting = Setting { shape, servers, entries: 48, steps: 1500, weather, mutation: None, mortal };
        let mut model = Model::new(setting, seed as u64);
        for (at, server) in model.world.lock().unwrap().servers.iter_mut().enumerate() {
            server.domain = u8::try_from(at % domains).unwrap();
        }
        model.run();
        assert!(model.seen.got > 50, "seed {seed}: {:?}", model.seen);
    }
}

#[test]
fn mistakes_with_domains_are_noticed() {
    for mutation in [Mutation::ShareDomain, Mutation::RebuildAnywhere] {
        let is_caught = |seed| {
            let run = AssertUnwindSafe(|| live_through(FOUR_AND_ONE, seed, Some(mutation)));
            catch_unwind(run).is_err()
        };
        assert!((1..8).any(is_caught), "{mutation:?} is not noticed");
    }
}

#[test]
fn rows_are_spread_evenly_over_too_few_domains() {
    for (domains, most) in [(1, 5), (2, 3), (3, 2), (4, 2)] {
        let mut model = pool(FOUR_AND_ONE, domains, 5, 7, None);
        model.fill();
        assert_eq!((model.crowding(), model.width()), (most, 5), "{domains} domains");
    }
}

#[test]
fn a_domain_that_is_lost_for_good_is_made_up_for_in_the_others() {
    let mut model = pool(FOUR_AND_ONE, 5, 2, 3, None);
    model.fill();
    model.crash(|server| server.domain == 1);
    model.wait(DEADLINE);
    model.until("all is rebuilt", Model::is_mended);
    assert_eq!(model.crowding(), 2, "whole with two in a domain is better than with one missing");
    model.crash(|server| server.domain == 1);
    model.read_all();
}

#[test]
fn a_server_that_joins_is_used_at_once() {
    let mut model = pool(FOUR_AND_ONE, 5, 1, 5, None);
    model.fill();
    model.crash(|server| server.domain == 3);
    model.wait(DEADLINE * 2);
    assert!(!model.is_mended(), "there is no other place");
    model.world.lock().unwrap().servers.push(Server::in_domain(5));
    model.until("it takes what was lost", Model::is_mended);
    let rebuilt = model.holds(5);
    model.rewrite(0..100);
    assert!(model.holds(5) > rebuilt, "and what is new");
    // Now any other may go.
    model.crash(|server| server.domain == 0);
    model.read_all();
}

#[test]
fn a_server_that_has_left_gets_nothing_new_and_is_read_as_long_as_it_is_there() {
    let mut model = pool(FOUR_AND_ONE, 7, 1, 11, None);
    model.fill();
    model.world.lock().unwrap().servers[2].unlisted = true;
    let held = model.holds(2);
    model.rewrite(0..50);
    model.read_all();
    assert!(held > 0 && (1..=held).contains(&model.holds(2)), "it keeps what it has");
    assert_eq!(model.width(), 5);
    // It ends. That is no reason to put off anything for ever, nor to give up any parity.
    model.crash(|server| server.domain == 2);
    model.wait(DEADLINE);
    model.until("all is rebuilt", Model::is_mended);
    (0..200).filter(|at| at % 4 > 0).for_each(|at| model.free(at));
    let moved = model.stripes.core.counts.moved_pages;
    model.until("pages move", |model| model.stripes.core.counts.moved_pages > moved + 10);
    model.crash(|server| server.domain == 0);
    model.read_all();
    assert_eq!(model.stripes.core.counts.lost_pages, 0);
}

#[test]
fn who_waits_for_pages_does_not_wait_for_all_that_could_be_rebuilt() {
    let mut model = pool(FOUR_AND_ONE, 7, 1, 5, None);
    model.fill();
    let at_once = |model: &mut Model, domain, waits: bool| {
        let most = Cell::new(0);
        let look = |model: &Model| most.set(most.get().max(model.stripes.core.jobs.rebuilding));
        model.crash(|server| server.domain == domain);
        model.world.lock().unwrap().mend(usize::from(domain));
        let enough = model.stripes.core.counts.rebuilt_chunks + 10;
        let is_done = |model: &Model| {
            look(model);
            model.stripes.core.counts.rebuilt_chunks > enough && model.is_mended()
        };
        for at in (0..200).cycle().take_while(|_| waits) {
            model.get(at, Urgency::Demand);
            model.until("it is answered", |model| {
                look(model);
                model.is_answered()
            });
            if is_done(model) {
                break;
            }
        }
        model.until("all is rebuilt", is_done);
        most.get()
    };
    assert!((1..=2).contains(&at_once(&mut model, 0, true)), "somebody waits");
    model.wait(Duration::from_secs(1));
    assert!(at_once(&mut model, 1, false) > 8, "nobody does");
    assert_eq!(at_once(&mut model, 2, true), 2, "somebody waits again");
    model.read_all();
}
