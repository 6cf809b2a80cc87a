//! Miss-ratio curves against the definition, and against what is known of the patterns.

use spillway_core::sample::HASHES;
use spillway_study::advice::{Observed, advise};
use spillway_study::curve::Curve;
use spillway_study::record::{Access, Fault};
use spillway_study::sampled::{Halved, Sampled};
use spillway_study::source::Step;

fn touch(page: u64) -> Step {
    Step::Touch { page, access: Access::Unknown, served: None, ran_ns: 1 }
}

/// The miss ratios of LRU with each of `sizes`, first touches apart: by keeping a list, most recently touched first.
fn by_definition(pages: &[u64], sizes: &[u64]) -> Vec<f64> {
    let (mut list, mut misses) = (Vec::new(), vec![0_u64; sizes.len()]);
    for page in pages {
        if let Some(at) = list.iter().rev().position(|other| other == page) {
            sizes.iter().zip(&mut misses).for_each(|(size, misses)| *misses += u64::from(at as u64 >= *size));
            list.remove(list.len() - 1 - at);
        }
        list.push(*page);
    }
    misses.iter().map(|misses| *misses as f64 / pages.len() as f64).collect()
}

fn curve(pages: &[u64], most: usize) -> Curve {
    let mut sampled = Sampled::new(most, HASHES);
    pages.iter().for_each(|page| sampled.push(touch(*page)));
    sampled.curve(None)
}

/// The mean distance of a curve from the definition over 40 sizes up to `all`.
fn mean_error(pages: &[u64], all: u64, most: usize) -> f64 {
    let sizes: Vec<u64> = (1..=40).map(|i| all * i / 40).collect();
    let curve = curve(pages, most);
    let exact = by_definition(pages, &sizes);
    sizes.iter().zip(&exact).map(|(size, exact)| (curve.miss_ratio(*size) - exact).abs()).sum::<f64>() / 40.0
}

fn random(mut x: u64) -> impl FnMut() -> f64 {
    move || {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        (x >> 11) as f64 / (1_u64 << 53) as f64
    }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a share of few pages")]
fn below(all: u64, share: f64) -> u64 {
    (all as f64 * share) as u64
}

fn cyclic(all: u64, count: usize) -> Vec<u64> {
    (0..all).cycle().take(count).collect()
}

fn uniform(all: u64, count: usize) -> Vec<u64> {
    let mut random = random(77);
    (0..count).map(|_| below(all, random())).collect()
}

/// Popularity by rank to the power of -0.99, ranks scattered.
fn zipf(all: u64, count: usize) -> Vec<u64> {
    let mut sums: Vec<f64> = (1..=all).map(|rank| (rank as f64).powf(-0.99)).collect();
    (1..sums.len()).for_each(|at| sums[at] += sums[at - 1]);
    let (mut random, total) = (random(99), sums[sums.len() - 1]);
    let pick = |share: f64| sums.partition_point(|sum| *sum < share * total) as u64;
    (0..count).map(|_| pick(random()) * 2_654_435_761 % all).collect()
}

const ALL: u64 = 3000;
const COUNT: usize = 24_000;

#[test]
fn without_a_sample_the_curve_is_the_definition() {
    for pages in [cyclic(300, 5000), uniform(300, 5000), zipf(300, 5000)] {
        assert!(mean_error(&pages, 300, 300) < 1e-9);
    }
}

#[test]
fn a_sample_of_a_third_is_close_to_it() {
    for (pattern, pages) in
        [("cyclic", cyclic(ALL, COUNT)), ("uniform", uniform(ALL, COUNT)), ("zipf", zipf(ALL, COUNT))]
    {
        let error = mean_error(&pages, ALL, 1000);
        assert!(error < 0.03, "{pattern}: {error}");
    }
}

#[test]
fn a_sample_of_fixed_size_has_that_size() {
    let mut sampled = Sampled::new(500, HASHES);
    uniform(50_000, 100_000).into_iter().for_each(|page| sampled.push(touch(page)));
    assert!((490..=500).contains(&sampled.pages()), "{}", sampled.pages());
    assert!((sampled.rate() - 0.01).abs() < 0.002, "{}", sampled.rate());
}

#[test]
fn a_cyclic_scan_has_a_cliff_where_it_fits() {
    let curve = curve(&cyclic(ALL, COUNT), 1000);
    assert!(curve.miss_ratio(ALL * 92 / 100) > 0.85, "{}", curve.miss_ratio(ALL * 92 / 100));
    assert!(curve.miss_ratio(ALL * 108 / 100) < 0.01);
}

#[test]
fn uniform_references_have_a_straight_curve() {
    // Once round first, so that every distance is that of a memory which holds them all.
    let pages: Vec<u64> = (0..ALL).chain(uniform(ALL, COUNT)).collect();
    let curve = curve(&pages, 1000);
    let again = COUNT as f64 / pages.len() as f64;
    for tenth in 1..10 {
        let expected = (1.0 - f64::from(u32::try_from(tenth).expect("small")) / 10.0) * again;
        let got = curve.miss_ratio(ALL * tenth / 10);
        assert!((got - expected).abs() < 0.05, "{tenth}: {got} against {expected}");
    }
}

#[test]
fn popular_pages_make_the_curve_sag() {
    let curve = curve(&zipf(ALL, COUNT), 1000);
    let (none, half, tenth) = (curve.miss_ratio(1), curve.miss_ratio(ALL / 2), curve.miss_ratio(ALL / 10));
    assert!(tenth < 0.6 * none, "a tenth of the memory takes nearly half of the misses: {none} {tenth}");
    assert!(half < 0.25 * none, "{none} {half}");
}

#[test]
fn a_page_that_was_there_before_misses_in_a_memory_that_could_not_have_kept_it() {
    let mut sampled = Sampled::new(1000, HASHES);
    for page in 0..100 {
        sampled.push(Step::Touch { page, access: Access::Unknown, served: Some((Fault::Fetch, 1)), ran_ns: 1 });
    }
    let curve = sampled.curve(None);
    assert_eq!((curve.misses(50), curve.misses(100)), (50.0, 0.0));
}

#[test]
fn advice_on_a_cyclic_scan_names_its_size() {
    let mut halved = Halved::new(1000, HASHES);
    cyclic(ALL, COUNT).into_iter().for_each(|page| halved.push(touch(page)));
    let observed = |pages| Observed { pages, ran_ns: COUNT as u64 * 5_000, miss_ns: 10_000, known_from_pages: 0 };
    let (whole, halves) = halved.curves(None);
    let advice = advise(&whole, None, observed(ALL * 2));
    assert!(advice.enough.pages.abs_diff(ALL) < ALL / 10, "{:?}", advice.enough);
    assert!(advice.thrashing.is_some_and(|point| point.pages.abs_diff(ALL) < ALL / 10), "{:?}", advice.thrashing);
    for half in halves {
        let enough = advise(&half, None, observed(ALL * 2)).enough;
        assert!(enough.pages.abs_diff(ALL) < ALL / 6, "{enough:?}");
    }
}
