//! What systems cost over some years, and what they do for it: total cost of ownership, and performance per dollar.
//!
//! The model is that of Lim et al., "System-level Implications of Disaggregated Memory" (HPCA 2012), sections 5 and 6: the
//! price of the hardware and what power and cooling take over its life, with a memory blade's cost divided among the servers
//! that share it. Invariant: no number stands in the code; what a description does not say is not assumed.

use serde::{Deserialize, Serialize};
use std::fmt;

/// The paper's two comparisons, as a description.
pub const PAPER: &str = include_str!("cost/paper.toml");
/// Systems of a study, and studies: more is no comparison that anyone reads.
const MOST: usize = 1000;
/// Hours of a year.
const YEAR_HOURS: f64 = 24.0 * 365.25;

/// Systems to compare, as TOML.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Description {
    years: f64,
    power: Option<Power>,
    #[serde(default)]
    study: Vec<Study>,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Power {
    price_per_kwh: f64,
    cooling: f64,
    activity: f64,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Study {
    name: String,
    baseline: String,
    #[serde(default)]
    system: Vec<System>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct System {
    name: String,
    #[serde(default = "one")]
    servers: u32,
    server: Machine,
    blade: Option<Machine>,
    performance: f64,
}

/// A server, or a blade of memory.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Machine {
    price: f64,
    operation: Option<f64>,
    watts: Option<f64>,
    dimms: Option<Dimms>,
    #[serde(default = "one")]
    shared_by: u32,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Dimms {
    count: u32,
    price: f64,
    #[serde(default)]
    watts: f64,
}

fn one() -> u32 {
    1
}

/// Why a description says nothing: one line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CostError(String);

impl fmt::Display for CostError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for CostError {}

/// Systems that were compared.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Comparison {
    /// What was compared.
    pub study: String,
    /// With which of them.
    pub baseline: String,
    /// Over how many years.
    pub years: f64,
    /// In the order of the description.
    pub systems: Vec<Costs>,
}

/// A system. Amounts in whatever money the prices were in.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Costs {
    /// Its name.
    pub name: String,
    /// How many servers it has.
    pub servers: u32,
    /// What is bought.
    pub hardware: f64,
    /// Power and cooling, over all years.
    pub operation: f64,
    /// Both: the total cost of ownership.
    pub total: f64,
    /// What it does, in any unit.
    pub performance: f64,
    /// That for each 1000 of the total.
    pub performance_per_1000: f64,
    /// That as a ratio to the baseline's.
    pub to_baseline: f64,
}

/// Compares the systems of a description.
///
/// # Errors
/// When it cannot be read, or says nothing that makes sense; the text names the place.
pub fn compare(toml: &str) -> Result<Vec<Comparison>, CostError> {
    let description: Description = toml::from_str(toml).map_err(|error| {
        let line = error.span().map_or(1, |span| 1 + toml[..span.start.min(toml.len())].matches('\n').count());
        CostError(plain(&format!("line {line}: {}", error.message())))
    })?;
    between("years", description.years, f64::MIN_POSITIVE)?;
    if let Some(Power { price_per_kwh, cooling, activity }) = description.power {
        between("power.price_per_kwh", price_per_kwh, 0.0)?;
        between("power.cooling", cooling, 0.0)?;
        between("power.activity", activity, 0.0)?;
    }
    if description.study.is_empty() || description.study.len() > MOST {
        return Err(CostError(
            "there is no [[study]] in it, or far too many: `spillway sim cost --example` shows one".into(),
        ));
    }
    description.study.iter().map(|study| compared(study, &description)).collect()
}

fn compared(study: &Study, of: &Description) -> Result<Comparison, CostError> {
    let name = plain(&study.name);
    if study.system.len() > MOST {
        return Err(CostError(format!("`{name}` has more than {MOST} systems")));
    }
    let mut systems = study.system.iter().map(|system| system.costs(of)).collect::<Result<Vec<_>, _>>()?;
    let baseline = plain(&study.baseline);
    let base = systems.iter().find(|system| system.name == baseline).map(|system| system.performance_per_1000);
    let base =
        base.ok_or_else(|| CostError(format!("`{name}` has no system named `{baseline}`, which is its baseline")))?;
    systems.iter_mut().for_each(|system| system.to_baseline = system.performance_per_1000 / base);
    Ok(Comparison { study: name, baseline, years: of.years, systems })
}

impl System {
    fn costs(&self, of: &Description) -> Result<Costs, CostError> {
        let name = plain(&self.name);
        let about = |error: CostError| CostError(format!("`{name}`: {error}"));
        between("performance", self.performance, f64::MIN_POSITIVE).map_err(about)?;
        let servers = f64::from(self.servers);
        let (mut hardware, mut operation) = (0.0, 0.0);
        for machine in [Some(&self.server), self.blade.as_ref()].into_iter().flatten() {
            let (price, runs) = machine.costs(of).map_err(about)?;
            hardware += servers * price;
            operation += servers * runs;
        }
        let total = hardware + operation;
        between("what it costs in all", total, f64::MIN_POSITIVE).map_err(about)?;
        let performance_per_1000 = 1000.0 * self.performance / total;
        between("its performance for a thousand", performance_per_1000, f64::MIN_POSITIVE).map_err(about)?;
        let (servers, performance) = (self.servers, self.performance);
        Ok(Costs { name, servers, hardware, operation, total, performance, performance_per_1000, to_baseline: 1.0 })
    }
}

impl Machine {
    /// What one costs each server: to buy, and to run for all years.
    fn costs(&self, of: &Description) -> Result<(f64, f64), CostError> {
        let dimms = self.dimms.unwrap_or(Dimms { count: 0, price: 0.0, watts: 0.0 });
        let given = [("price", self.price), ("dimms.price", dimms.price), ("dimms.watts", dimms.watts)];
        given.into_iter().try_for_each(|(what, number)| between(what, number, 0.0))?;
        if self.shared_by == 0 {
            return Err(CostError("shared_by = 0: give how many servers share it".into()));
        }
        let count = f64::from(dimms.count);
        let operation = match (self.operation, self.watts) {
            (Some(operation), None) if dimms.watts == 0.0 => operation,
            (None, Some(watts)) => {
                between("watts", watts, 0.0)?;
                let power = of.power.ok_or_else(|| CostError("watts need [power]: what a kWh costs".into()))?;
                let kwh = (watts + count * dimms.watts) * power.activity * of.years * YEAR_HOURS / 1000.0;
                kwh * power.cooling * power.price_per_kwh
            }
            _ => return Err(CostError("give either operation or watts, for it and its DIMMs".into())),
        };
        between("operation", operation, 0.0)?;
        let share = f64::from(self.shared_by);
        Ok(((self.price + count * dimms.price) / share, operation / share))
    }
}

/// Whether a number is one, and at least so much.
fn between(what: &str, number: f64, least: f64) -> Result<(), CostError> {
    if number.is_finite() && number >= least {
        return Ok(());
    }
    let more = if least > 0.0 { "more than 0" } else { "0 or more" };
    Err(CostError(format!("{what} is {number}: give {more}")))
}

/// A line without control characters.
fn plain(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of<'a>(all: &'a Comparison, name: &str) -> &'a Costs {
        all.systems.iter().find(|system| system.name.starts_with(name)).expect(name)
    }

    fn to_baseline(all: &Comparison, name: &str) -> f64 {
        of(all, name).to_baseline
    }

    #[test]
    fn the_papers_own_figures_come_out() {
        let [memcached, consolidation] = &compare(PAPER).expect("its own")[..] else { panic!("two studies") };
        let totals = |of: &Comparison| of.systems.iter().map(|each| (each.hardware, each.total)).collect::<Vec<_>>();
        let pooled = (2410.0, 3148.0);
        assert_eq!(totals(memcached), [(3360.0, 4768.0), (2646.0, 3618.0), pooled, pooled]);
        let (base, pooled) = ((1680.0, 2434.0), (2222.0, 3052.0));
        assert_eq!(totals(consolidation), [(2646.0, 3618.0), base, base, pooled, pooled]);
        // "A 50% improvement in performance/TCO": 4768 / 3148 is 1.51.
        assert_eq!(format!("{:.2}", to_baseline(memcached, "pooled, by latency")), "1.51");
        // What the paper says in words: Base and CBPS have lower peaks than Max. The costs and 4 and 5 of 8 VMs say it already: that
        // CBPS is as fast as the others is assumed, and a penalty would only lower it.
        assert!(["Base", "CBPS"].iter().all(|name| to_baseline(consolidation, name) < 1.0));
    }

    /// "Up to 17% perf/$ improvement versus the Max configuration at 8 VMs" is not reproduced here, nor can it be: the throughput that
    /// it rests on is in a figure alone. The description's 0.987 was made from the 17 %, so that the 17 % come out again shows
    /// that the arithmetic is the paper's, and nothing more.
    #[test]
    fn the_papers_17_per_cent_go_in_and_come_out() {
        let [_, consolidation] = &compare(PAPER).expect("its own")[..] else { panic!("two studies") };
        let pooled = of(consolidation, "DM+CBPS");
        assert_eq!(
            format!("{:.3}", 1.17 * pooled.total / of(consolidation, "Max").total),
            pooled.performance.to_string()
        );
        assert_eq!(format!("{:.2}", pooled.to_baseline), "1.17");
    }

    /// What can be seen without that figure: both host 8 VMs, and pooled memory makes none faster, so what a pooled server saves is the
    /// most that it can gain. The paper's 17 % are within that, and ask for all but the whole speed of Max.
    #[test]
    fn what_pooled_memory_saves_bounds_what_it_gains() {
        let [_, consolidation] = &compare(PAPER).expect("its own")[..] else { panic!("two studies") };
        let max = of(consolidation, "Max");
        let most = max.total / of(consolidation, "DM+CBPS").total;
        assert_eq!(format!("{most:.3}"), "1.185");
        assert!(1.17 < most);
        for name in ["DM:", "DM+CBPS"] {
            let pooled = of(consolidation, name);
            assert!(pooled.performance <= max.performance && pooled.to_baseline <= most, "{pooled:?}");
        }
        // By costs alone DM, too, is above Max unless its VMs lose 15.6 %; they are assumed to lose ten ("within 10%").
        assert_eq!(format!("{:.3}", 1.0 / most), "0.844");
        assert!(to_baseline(consolidation, "DM:") > 1.0);
        // At the speed of Max the model comes to that bound.
        let as_fast = PAPER.replace("performance = 0.987", "performance = 1");
        let [_, consolidation] = &compare(&as_fast).expect("its own")[..] else { panic!("two studies") };
        assert!((to_baseline(consolidation, "DM+CBPS") - most).abs() < 1e-9);
    }

    #[test]
    fn prices_of_parts_add_up() {
        let own = "years = 2\n[power]\nprice_per_kwh = 0.1\ncooling = 1.5\nactivity = 0.5\n[[study]]\nname='s'\nbaseline='a'\n\
                   [[study.system]]\nname='a'\nservers=3\nperformance=6\nserver={price=1000,watts=100,dimms={count=4,price=50,watts=5}}\n\
                   blade={price=800,watts=40,shared_by=8,dimms={count=16,price=25}}\n";
        let costs = compare(own).expect("makes sense").remove(0).systems.remove(0);
        // Three servers of 1000 + 4 x 50, and an eighth of 800 + 16 x 25 for each.
        assert!((costs.hardware - 3.0 * (1200.0 + 150.0)).abs() < 1e-9, "{costs:?}");
        // 120 W + 5 W, half of the time, for two years.
        let kwh = 3.0 * 125.0 * 0.5 * 2.0 * 8766.0 / 1000.0;
        assert!((costs.operation - kwh * 0.15).abs() < 1e-9, "{costs:?}");
        assert!((costs.performance_per_1000 - 6000.0 / costs.total).abs() < 1e-9, "{costs:?}");
    }

    #[test]
    fn what_makes_no_sense_is_named() {
        let system = "[[study.system]]\nname='a'\nperformance=1\nserver=";
        for (text, word) in [
            ("years = 3".to_owned(), "no [[study]]"),
            ("years = 0\n[[study]]\nname='s'\nbaseline='a'".to_owned(), "years is 0"),
            (
                "years = 3\n[[study]]\nname='s'\nbaseline='b'\n".to_owned() + system + "{price=1,operation=1}",
                "no system named `b`",
            ),
            (
                "years = 3\n[[study]]\nname='s'\nbaseline='a'\n".to_owned() + system + "{price=-1,operation=1}",
                "price is -1",
            ),
            (
                "years = 3\n[[study]]\nname='s'\nbaseline='a'\n".to_owned() + system + "{price=1,watts=1}",
                "need [power]",
            ),
            (
                "years = 3\n[[study]]\nname='s'\nbaseline='a'\n".to_owned() + system + "{price=1}",
                "either operation or watts",
            ),
            (
                "years = 3\n[[study]]\nname='s'\nbaseline='a'\n".to_owned() + system + "{price=0,operation=0}",
                "costs in all",
            ),
            ("years = 3\nyeers = 2".to_owned(), "line 2: unknown field `yeers`"),
            ("years = nan".to_owned(), "years is NaN"),
            ("years = \"\x1b\"".to_owned(), "line 1"),
        ] {
            let error = compare(&text).expect_err(&text).to_string();
            assert!(error.contains(word) && !error.contains(char::is_control), "{error}");
        }
    }
}
