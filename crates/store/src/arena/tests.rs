use super::*;
use crate::segment::Refill;

fn arena() -> (Arena, Refill) {
    let (supply, refill) = Supply::new(None);
    (Arena::new(supply), refill)
}

/// Allocates, and names the owner by number.
fn alloc(arena: &mut Arena, len: usize, owner: u32) -> Place {
    let place = arena.alloc(len, u64::MAX).unwrap();
    arena.set_owner(place, Handle::from_bits(owner).unwrap());
    place
}

/// Numbers that look random, from the same seed each time.
fn random(below: u32) -> impl Iterator<Item = u32> {
    let mut state = 1_u64;
    std::iter::repeat_with(move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        u32::try_from(state >> 33).unwrap() % below
    })
}

#[test]
fn objects_keep_to_themselves() {
    let (mut arena, _refill) = arena();
    let mut objects = Vec::new();
    for (n, len) in (1..).zip(random(4096)).take(3000) {
        let len = u16::try_from(len + 1).unwrap();
        let place = alloc(&mut arena, usize::from(len), n);
        arena.bytes_mut(place, len).fill(n.to_le_bytes()[0]);
        objects.push((place, len, n.to_le_bytes()[0]));
        if n % 3 == 0 {
            let (place, ..) = objects.swap_remove(n as usize % objects.len());
            arena.free(place);
        }
    }
    arena.check();
    for (place, len, byte) in objects {
        assert!(arena.bytes(place, len).iter().all(|stored| *stored == byte));
        arena.free(place);
    }
    arena.check();
    assert_eq!((arena.live_bytes(), arena.held()), (0, EMPTY_MAX as u64));
}

#[test]
fn nothing_is_allocated_beyond_the_limit_and_larger_holes_serve() {
    let (mut arena, _refill) = arena();
    let whole: Vec<Place> = (1..=512).map(|_| arena.alloc(4096, 1).unwrap()).collect();
    assert_eq!(arena.alloc(100, 1), Err(StoreError::Full));
    assert!(arena.fits_instead(whole[0], 100));
    arena.free(whole[5]);
    assert_eq!(arena.alloc(100, 1), Ok(whole[5]));
    assert!(arena.alloc(100, 1).is_err());
    arena.check();
}

#[test]
fn segments_come_from_the_refill_and_go_back_to_it() {
    let (mut arena, mut refill) = arena();
    assert!(refill.top_up());
    let ready_bytes = arena.memory_bytes();
    let places: Vec<Place> = (1..=1024).map(|n| alloc(&mut arena, 4096, n)).collect();
    assert_eq!(arena.supply().inline_segments, 0);
    assert_eq!(arena.memory_bytes() - arena.table_bytes(), ready_bytes);
    for place in places {
        arena.free(place);
    }
    assert_eq!(arena.held(), 1);
    assert!(refill.top_up());
    assert!(arena.memory_bytes() - arena.table_bytes() <= ready_bytes + u64::from(SEGMENT_BYTES));
    drop(arena);
    assert!(!refill.top_up());
}

#[test]
fn without_a_refill_segments_are_made_inline_and_unmapped_at_once() {
    let (mut arena, refill) = arena();
    drop(refill);
    let places: Vec<Place> = (1..=2048).map(|n| alloc(&mut arena, 4096, n)).collect();
    assert_eq!(arena.supply().inline_segments, 4);
    for place in places {
        arena.free(place);
    }
    assert_eq!(arena.memory_bytes() - arena.table_bytes(), u64::from(SEGMENT_BYTES));
}

#[test]
fn segments_that_find_no_way_back_are_used_or_go_later() {
    let (mut arena, mut refill) = arena();
    let fill = |arena: &mut Arena| (1..=50 * 512).map(|n| alloc(arena, 4096, n)).collect::<Vec<Place>>();
    for place in fill(&mut arena) {
        arena.free(place);
    }
    arena.check();
    let kept = arena.held();
    assert!(kept > EMPTY_MAX as u64 && kept < 50);
    let inline_segments = arena.supply().inline_segments;
    let places = fill(&mut arena);
    assert_eq!(arena.supply().inline_segments, inline_segments + 50 - kept);
    for place in places {
        refill.top_up();
        arena.free(place);
    }
    refill.top_up();
    arena.give_back_empty();
    assert_eq!(arena.held(), EMPTY_MAX as u64);
}

/// An arena of about 30 segments, with three quarters of its objects freed at random.
fn full_of_holes(arena: &mut Arena) -> Vec<Option<(Place, u16)>> {
    let mut objects: Vec<Option<(Place, u16)>> = Vec::new();
    for (n, len) in (1..).zip(random(3000)).take(40_000) {
        let len = u16::try_from(len + 500).unwrap();
        let place = alloc(arena, usize::from(len), n);
        arena.bytes_mut(place, len)[..4].copy_from_slice(&n.to_le_bytes());
        objects.push(Some((place, len)));
    }
    for (object, chance) in objects.iter_mut().zip(random(4)) {
        if chance > 0 {
            arena.free(object.take().unwrap().0);
        }
    }
    objects
}

#[test]
fn evacuation_gives_memory_back_and_loses_nothing() {
    let (mut arena, mut refill) = arena();
    let mut objects = full_of_holes(&mut arena);
    let held_before = arena.held();
    assert!(arena.is_loose());
    let mut moves = 0;
    while let Some((place, owner)) = arena.next_to_move() {
        let object = &mut objects[owner.bits() as usize - 1].as_mut().unwrap();
        assert_eq!(object.0, place);
        object.0 = arena.move_out(place, object.1, owner).expect("there is room");
        arena.free(place);
        moves += 1;
        if moves % 100 == 0 {
            arena.check();
            refill.top_up();
        }
    }
    arena.check();
    assert!(!arena.is_loose());
    assert!(arena.held() * 2 < held_before, "{} of {held_before} segments left", arena.held());
    for (n, object) in (1_u32..).zip(objects) {
        if let Some((place, len)) = object {
            assert_eq!(arena.bytes(place, len)[..4], n.to_le_bytes());
            arena.free(place);
        }
    }
    arena.check();
    assert_eq!(arena.live_bytes(), 0);
}

#[test]
fn evacuation_bears_frees_and_allocations_meanwhile() {
    let (mut arena, mut refill) = arena();
    let mut objects = full_of_holes(&mut arena);
    let (mut choices, count) = (random(40_000), u32::try_from(objects.len()).unwrap());
    for round in 0..20_000 {
        if let Some((place, owner)) = arena.next_to_move() {
            let object = &mut objects[owner.bits() as usize - 1].as_mut().unwrap();
            if let Some(to) = arena.move_out(place, object.1, owner) {
                object.0 = to;
                arena.free(place);
            }
        }
        let choice = choices.next().unwrap() % count;
        let object = &mut objects[choice as usize];
        match object.take() {
            Some((place, _)) => arena.free(place),
            None if round % 4 == 0 => {
                let len = u16::try_from(choice % 4000 + 4).unwrap();
                let place = alloc(&mut arena, usize::from(len), choice + 1);
                arena.bytes_mut(place, len)[..4].copy_from_slice(&(choice + 1).to_le_bytes());
                *object = Some((place, len));
            }
            None => {}
        }
        if round % 1000 == 0 {
            arena.check();
            refill.top_up();
        }
    }
    arena.check();
    for (n, object) in (1_u32..).zip(objects) {
        if let Some((place, len)) = object {
            assert_eq!(arena.bytes(place, len)[..4], n.to_le_bytes());
        }
    }
}

#[test]
fn evacuation_that_finds_no_room_is_called_off() {
    let (mut arena, _refill) = arena();
    // Whole pages fill every segment but for the objects of one class, which thin out: nowhere else can they go.
    let mut thin = Vec::new();
    for n in 1..=20_000 {
        thin.push(alloc(&mut arena, 2000, n));
    }
    for (n, place) in thin.iter().enumerate() {
        if n % 32 != 0 {
            arena.free(*place);
        }
    }
    // All vacant room is taken by whole pages; the objects left have spans of their own, each with one.
    let held = arena.held();
    while arena.alloc(4096, held).map(|place| arena.set_owner(place, Handle::from_bits(1).unwrap())).is_ok() {}
    arena.check();
    let next = arena.next_to_move();
    if let Some((place, owner)) = next {
        let moved = arena.move_out(place, 4096, owner);
        assert!(moved.is_none());
        assert!(arena.next_to_move().is_none(), "it rests");
    }
    arena.check();
}
