//! Stripes over servers that do everything that servers do, from one seed: the same seed repeats the run.
//! `SPILLWAY_STRIPES_SEEDS=0..1000` tries others.

mod deaths;
mod domains;
mod model;
mod servers;

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

pub(super) use deaths::point;
use model::{Model, Seen, Setting, Weather};

use super::watch::SILENT_AFTER;
use super::{Mutation, Shape};
use crate::{Store as _, Urgency};
use spillway_core::page::BURDENS_MAX;

const SHAPES: [(usize, usize, usize); 6] = [(2, 1, 3), (4, 1, 5), (4, 1, 7), (1, 1, 2), (2, 2, 5), (4, 2, 6)];

fn setting(seed: u64, weather: Weather) -> Setting {
    let (data, parity, servers) = SHAPES[usize::try_from(seed).unwrap() % SHAPES.len()];
    Setting { shape: Shape { data, parity }, servers, entries: 48, steps: 1500, weather, mutation: None, mortal: false }
}

fn seeds(default: Range<u64>) -> Range<u64> {
    let Ok(text) = std::env::var("SPILLWAY_STRIPES_SEEDS") else { return default };
    let (from, to) = text.split_once("..").expect("seeds are given as FROM..TO");
    from.parse().expect("a number")..to.parse().expect("a number")
}

fn run(setting: Setting, seed: u64) -> Result<Seen, String> {
    let run = || {
        let mut model = Model::new(setting, seed);
        model.run();
        let counts = model.stripes.core.counts;
        Seen {
            moved: counts.moved_pages,
            dropped: counts.dropped_copies,
            rebuilt: counts.rebuilt_chunks,
            hedged: counts.hedged,
            ..model.seen
        }
    };
    catch_unwind(AssertUnwindSafe(run)).map_err(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        text.or(panic.downcast_ref::<&str>().map(ToString::to_string)).unwrap_or_default()
    })
}

fn try_all(weather: Weather, mortal: bool, seeds: Range<u64>) -> Seen {
    let mut all = Seen::default();
    for seed in seeds {
        let setting = Setting { mortal, ..setting(seed, weather) };
        let seen = run(setting, seed).unwrap_or_else(|text| panic!("seed {seed}, {setting:?}: {text}"));
        all.got += seen.got;
        all.lost += seen.lost;
        all.declined += seen.declined;
        all.faults += seen.faults;
        all.moved += seen.moved;
        all.dropped += seen.dropped;
        all.rebuilt += seen.rebuilt;
        all.hedged += seen.hedged;
        all.deaths += seen.deaths;
    }
    all
}

#[test]
fn no_page_is_lost_while_losses_are_survivable() {
    let seen = try_all(Weather::Survivable, false, seeds(0..60));
    assert!(seen.moved > 100 && seen.dropped > 50 && seen.rebuilt > 100 && seen.hedged > 100, "{seen:?}");
    assert!(seen.got > 5000 && seen.faults > 100 && seen.lost == 0, "{seen:?}");
}

#[test]
fn no_byte_is_wrong_and_no_get_hangs_whatever_happens() {
    let seen = try_all(Weather::Wild, false, seeds(0..60));
    assert!(seen.got > 5000 && seen.faults > 500 && seen.lost > 0, "{seen:?}");
}

#[test]
fn a_pager_may_be_killed_between_any_two_steps() {
    // So many, because copies are seldom given up where a pager dies so often.
    let seen = try_all(Weather::Survivable, true, seeds(0..180));
    println!("{seen:?}");
    assert!(
        seen.deaths > 1000 && seen.moved > 30 && seen.dropped > 0 && seen.rebuilt > 30 && seen.lost == 0,
        "{seen:?}"
    );
    let seen = try_all(Weather::Wild, true, seeds(0..60));
    println!("{seen:?}");
    assert!(seen.deaths > 1000 && seen.got > 1000 && seen.lost > 0, "{seen:?}");
}

#[test]
fn a_page_that_is_put_as_it_is_moves_without_being_read() {
    let mut model = Model::new(Setting { entries: 200, steps: 0, ..setting(1, Weather::Survivable) }, 1);
    model.fill();
    let left = || (0..200).step_by(4);
    (0..200).filter(|at| at % 4 > 0).for_each(|at| model.free(at));
    let before = model.stripes.core.counts;
    assert!(left().all(|at| model.put_again(at)));
    model.until("they are written", |model| model.stripes.core.counts.moved_pages >= before.moved_pages + 16);
    assert_eq!(model.stripes.core.counts.chunks_got, before.chunks_got);
    model.read_all();
}

#[test]
fn reads_that_are_answered_in_time_set_off_few_alarms() {
    let mut model = Model::new(Setting { entries: 200, steps: 0, ..setting(1, Weather::Survivable) }, 1);
    model.fill();
    let (since, before) = (model.now(), model.alarms());
    for at in (0..4000).map(|at| at % 200) {
        model.get(at, Urgency::Demand);
        model.until("it is answered", Model::is_answered);
    }
    let took_ms = (model.now() - since).as_millis();
    let alarms = u128::from(model.alarms() - before);
    assert!(took_ms > 500 && alarms <= took_ms + took_ms / 4, "{alarms} in {took_ms} ms");
}

#[test]
fn a_member_that_comes_just_after_the_others_were_looked_at_is_known() {
    let mut model = Model::new(Setting { entries: 200, steps: 0, ..setting(1, Weather::Survivable) }, 1);
    for at in 0..8 {
        model.stripes.progress(&mut |_| {});
        model.world.lock().unwrap().servers.push(servers::Server::in_domain(16 + at));
        model.stripes.progress(&mut |_| {});
        model.put(at);
    }
    model.until("all is kept", |model| model.stripes.core.is_written_out());
    model.read_all();
}

#[test]
fn moving_pages_sets_off_few_alarms() {
    let mut model = Model::new(Setting { entries: 800, steps: 0, ..setting(1, Weather::Survivable) }, 1);
    model.fill();
    (0..800).filter(|at| at % 4 > 0).for_each(|at| model.free(at));
    let before = model.alarms();
    model.until("they have moved", |model| model.stripes.core.counts.moved_pages >= 150);
    let alarms = model.alarms() - before;
    assert!(alarms < 150, "{alarms} for 150 pages");
}

#[test]
fn copies_of_local_pages_in_rows_of_holes_are_given_up_and_not_moved() {
    let mut model = Model::new(Setting { entries: 200, steps: 0, ..setting(1, Weather::Survivable) }, 1);
    model.fill();
    assert!(!(0..200).any(|at| model.give_up(at)) && !model.stripes.has_burdens(), "nothing would be won");
    (0..200).filter(|at| at % 4 > 1).for_each(|at| model.free(at));
    model.share_with(2, 0);
    assert!(model.stripes.has_burdens() && !model.give_up(0), "another has it as well");
    let before = model.stripes.core.counts;
    let given_up = (4..200).filter(|at| at % 4 < 2).filter(|&at| model.give_up(at)).count() as u64;
    let after = model.stripes.core.counts;
    assert!(given_up >= 80, "{given_up}: as long as there are holes to win back");
    assert_eq!(after.dropped_copies - before.dropped_copies, given_up);
    assert!(after.groups + given_up / 2 <= before.groups + 1, "{after:?}");
    assert_eq!((after.chunks_put, after.chunks_got), (before.chunks_put, before.chunks_got));
    model.read_all();
}

#[test]
fn copies_are_looked_for_only_where_there_are_enough_but_given_up_where_they_show() {
    let mut model = Model::new(Setting { entries: 2000, steps: 0, ..setting(1, Weather::Survivable) }, 1);
    model.fill();
    (0..2000).filter(|at| at % 4 > 1).for_each(|at| model.free(at));
    // Of each row one of its two pages: none has such pages alone, and then one, two, three.
    for row in 0..3 {
        assert!(!model.give_up(4 * row) && !model.stripes.has_burdens(), "{row} of 500 rows");
        let handle = model.table[4 * row + 1].expect("it is kept").handle;
        model.stripes.core.set_home(handle, true);
    }
    assert!(!model.stripes.has_burdens(), "3 of 500 rows");
    assert!(model.give_up(1), "it is in hand");
    let looked_for = (3..8).filter(|row| {
        let handles = [0, 1].map(|at| model.table[4 * row + at].expect("it is kept").handle);
        handles.into_iter().for_each(|handle| model.stripes.core.set_home(handle, true));
        model.stripes.has_burdens()
    });
    assert_eq!(looked_for.count(), 5, "4 of 500 rows, and more");
}

#[test]
fn copies_that_are_asked_about_together_are_judged_as_one_by_one() {
    let model = || {
        let mut model = Model::new(Setting { entries: 200, steps: 0, ..setting(1, Weather::Survivable) }, 1);
        model.fill();
        (0..200).filter(|at| at % 4 > 1).for_each(|at| model.free(at));
        let handles: Vec<_> = model.table[..100].iter().flatten().map(|entry| entry.handle).collect();
        (model, handles)
    };
    let ((mut one, handles), (mut other, same)) = (model(), model());
    assert!(handles == same && (33..BURDENS_MAX).contains(&handles.len()));
    // At first the other page of each row is not known to be local as well.
    for count in [handles.len() / 2, handles.len()] {
        let together = one.stripes.burdens(&handles);
        let singly = handles.iter().enumerate().map(|(at, &handle)| other.stripes.burdens(&[handle]) << at);
        assert_eq!(together, singly.fold(0, |bits, bit| bits | bit));
        assert_eq!(together.count_ones() as usize, count, "{together:b}");
    }
    assert_eq!(one.stripes.core.counts, other.stripes.core.counts);
}

#[test]
fn a_page_whose_member_is_away_is_let_go_only_if_it_can_be_made_out_of_others() {
    let shape = Shape { data: 4, parity: 1 };
    let weather = Weather::Survivable;
    let mut model =
        Model::new(Setting { shape, servers: 5, entries: 64, steps: 0, weather, mutation: None, mortal: false }, 7);
    model.fill();
    model.world.lock().unwrap().cut(1, false);
    assert!((0..64).any(|at| model.member_of(at) == 1));
    assert!((0..64).all(|at| model.put_again(at)), "all others of each row are there");
    model.world.lock().unwrap().cut(2, false);
    for at in 0..64 {
        let away = matches!(model.member_of(at), 1 | 2);
        assert_eq!(model.put_again(at), !away, "page {at}");
    }
    model.until("all is kept", |model| model.table.iter().flatten().all(|entry| !entry.putting));
    // So nothing is lost, however the two come back.
    for member in [1, 2] {
        let mut world = model.world.lock().unwrap();
        world.cut(member, true);
        world.mend(member);
    }
    model.read_all();
}

#[test]
fn a_sweep_that_can_begin_nothing_rests_twenty_times_as_long_unless_a_member_comes() {
    let shape = Shape { data: 1, parity: 1 };
    let weather = Weather::Survivable;
    let setting = Setting { shape, servers: 2, entries: 1500, steps: 0, weather, mutation: None, mortal: false };
    let mut model = Model::new(setting, 13);
    model.fill();
    model.world.lock().unwrap().cut(1, true);
    let due = |model: &Model| model.stripes.core.upkeep.sweep_at().is_some_and(|at| at <= model.now());
    for sweep in 0..3 {
        model.until("a sweep begins", due);
        let began = model.now();
        model.until("it ends", |model| !due(model));
        // It begins at the next step, so that this is a little more than it took.
        let took = model.now() - began;
        let rest = model.stripes.core.upkeep.sweep_at().expect("a member is away") - model.now();
        assert!(took > Duration::from_millis(100), "sweep {sweep} took {took:?}");
        let least = (took - Duration::from_millis(40)) * 20;
        assert!((least.min(Duration::from_secs(10))..=took * 20).contains(&rest), "sweep {sweep}: {took:?}, {rest:?}");
    }
    model.world.lock().unwrap().mend(1);
    let back = model.now();
    model.until("a sweep begins", due);
    assert!(model.now() - back < Duration::from_millis(100), "{:?}", model.now() - back);
}

#[test]
fn a_server_that_leaves_is_emptied_and_used_again_when_it_stays() {
    // With a spare, chunks go there; without, pages go to shorter rows.
    for (data, parity, servers) in [(4, 1, 7), (4, 1, 5), (2, 1, 3), (1, 1, 3), (4, 2, 6)] {
        let shape = Shape { data, parity };
        let weather = Weather::Survivable;
        let mut model =
            Model::new(Setting { shape, servers, entries: 64, steps: 0, weather, mutation: None, mortal: false }, 5);
        model.fill();
        let held = |model: &Model| model.world.lock().unwrap().servers[1].kept.len();
        assert!(held(&model) > 0, "{shape:?}");
        model.world.lock().unwrap().servers[1].leaving = true;
        model.until("it is empty", |model| held(model) == 0);
        model.read_all();
        (0..64).for_each(|at| model.put(at));
        model.fill();
        assert_eq!(held(&model), 0, "{shape:?}: nothing goes there");
        // It may stop, and another may be lost: nothing was given up for it.
        model.until("all is whole", Model::is_whole);
        model.world.lock().unwrap().cut(1, true);
        model.read_all();
        assert_eq!(model.stripes.core.counts.lost_pages, 0, "{shape:?}");
        model.world.lock().unwrap().mend(1);
        model.world.lock().unwrap().servers[1].leaving = false;
        for _ in 0..100 {
            model.progress();
        }
        (0..64).for_each(|at| model.put(at));
        model.fill();
        assert!(held(&model) > 0, "{shape:?}: it is used again");
    }
}

#[test]
fn a_member_that_goes_in_the_middle_of_a_fetch_is_not_waited_for() {
    let shape = Shape { data: 4, parity: 1 };
    let weather = Weather::Survivable;
    let mut model =
        Model::new(Setting { shape, servers: 5, entries: 64, steps: 0, weather, mutation: None, mortal: false }, 9);
    model.fill();
    for at in 0..64 {
        model.get(at, Urgency::Demand);
    }
    let asked = model.now();
    model.world.lock().unwrap().cut(2, false);
    model.until("all is answered", |model| model.is_answered());
    let took = model.now() - asked;
    assert!(took < super::watch::SUSPECT_AFTER, "{took:?}: it was made out of others only when it was suspected");
}

#[test]
fn what_a_silent_member_does_not_take_is_put_elsewhere() {
    // With a spare, its chunks go there; without, the pages go to shorter rows.
    for (data, parity, servers) in [(4, 1, 5), (4, 1, 7), (4, 2, 6), (1, 1, 3)] {
        let shape = Shape { data, parity };
        let weather = Weather::Survivable;
        let mut model =
            Model::new(Setting { shape, servers, entries: 400, steps: 0, weather, mutation: None, mortal: false }, 3);
        let asked = model.now();
        model.world.lock().unwrap().servers[1].stalled_until = Some(asked + Duration::from_secs(5));
        model.insist();
        let took = model.now() - asked;
        assert!(took < SILENT_AFTER + Duration::from_millis(300), "{shape:?}: {took:?}");
    }
}

#[test]
fn mistakes_are_told_from_the_right_one() {
    let mutations = [
        Mutation::AckEarly,
        Mutation::ShareMember,
        Mutation::LeakChunks,
        Mutation::ForgetMove,
        Mutation::StaleParity,
        Mutation::IgnoreFailure,
        Mutation::NeverRebuild,
        Mutation::PlaceFirst,
        Mutation::FreeFirst,
        Mutation::KeepUnnamed,
        Mutation::KeepStrays,
    ];
    for mutation in mutations {
        let mortal = matches!(
            mutation,
            Mutation::PlaceFirst | Mutation::FreeFirst | Mutation::KeepUnnamed | Mutation::KeepStrays
        );
        let is_caught = |seed| {
            let setting = Setting { mutation: Some(mutation), mortal, ..setting(seed, Weather::Survivable) };
            run(setting, seed).is_err()
        };
        let caught = (0..200).find(|seed| is_caught(*seed));
        println!("{mutation:?}: {caught:?}");
        assert!(caught.is_some(), "{mutation:?} is not noticed");
    }
}

#[test]
fn a_seed_repeats_its_run() {
    let once = |seed| {
        let mut model = Model::new(setting(seed, Weather::Wild), seed);
        model.run();
        (model.seen.got, model.seen.lost, model.seen.declined, model.stripes.core.counts)
    };
    assert_eq!(once(4), once(4));
    assert_ne!(once(4), once(10));
}
