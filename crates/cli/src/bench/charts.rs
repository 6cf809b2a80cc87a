//! Results as charts, in SVG.

use super::modes::Mode;
use super::programs::Timings;
use super::results::{Compared, Results, Runs};
use plotters::coord::ranged1d::{AsRangedCoord, ValueFormatter};
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;

const SIZE: (u32, u32) = (720, 380);
/// What the lines of a chart are: by mode, points from left to right.
type Lines = BTreeMap<Mode, Vec<(f64, f64)>>;
/// What its bars are: by program, one for each mode.
type Bars<'a> = Vec<(&'a str, BTreeMap<Mode, f64>)>;
/// So much of a program's line stands below its bars.
const BAR_CHARACTERS: usize = 24;

/// A chart and what it shows.
pub(super) struct Chart {
    pub(super) heading: String,
    pub(super) svg: String,
}

/// How a chart's axes are.
struct Axes<'a> {
    x: &'a str,
    y: &'a str,
    /// Between which values the vertical one goes, and whether by powers of ten.
    from: f64,
    to: f64,
    powers: bool,
}

/// Latencies of each case; throughput and slowdown by local share, where a workload was measured with several.
pub(super) fn all(results: &Results) -> Result<Vec<Chart>, Box<dyn Error>> {
    let mut charts = Vec::new();
    for case in &results.cases {
        charts
            .push(Chart { heading: format!("How long an access takes: {}", case.case.title()), svg: latencies(case)? });
    }
    let mut workloads: BTreeMap<String, Vec<&Compared>> = BTreeMap::new();
    for case in &results.cases {
        workloads.entry(case.case.workload()).or_default().push(case);
    }
    for (workload, mut cases) in workloads {
        cases.sort_by_key(|case| case.case.local_percent);
        if cases.len() < 2 {
            continue;
        }
        let throughput = by_share(&cases, |runs, _| Some(runs.median(|of| of.accesses_per_s)?.median));
        let svg = shares(&throughput, "accesses per second")?;
        charts.push(Chart { heading: format!("Throughput by local share: {workload}"), svg });
        let slowdown = by_share(&cases, |runs, native| Some(native?.ratio(runs, |of| of.accesses_per_s)?.median));
        if !slowdown.is_empty() {
            let svg = shares(&slowdown, "times slower than native")?;
            charts.push(Chart { heading: format!("Slowdown by local share: {workload}"), svg });
        }
    }
    charts.extend(slowdowns(&results.programs)?);
    Ok(charts)
}

/// How many times as long programs take as with all of their memory local: a chart for each share, a group of bars for each program.
fn slowdowns(programs: &[Timings]) -> Result<Vec<Chart>, Box<dyn Error>> {
    let all: Vec<_> = programs.iter().map(|program| (program.title(), program.slowdowns())).collect();
    let shares: BTreeSet<u64> = programs.iter().flat_map(|program| program.shares.keys().copied()).collect();
    let chart = |share: u64| {
        let of_share: Bars<'_> = all
            .iter()
            .map(|(title, modes)| {
                let bars = modes.iter().filter_map(|(mode, by_share)| Some((*mode, by_share.get(&share)?.median)));
                (*title, bars.collect())
            })
            .collect();
        Ok(Chart { heading: format!("Slowdown by program: {share} % local"), svg: bars(&of_share)? })
    };
    shares.into_iter().rev().map(chart).collect()
}

fn bars(of: &Bars<'_>) -> Result<String, Box<dyn Error>> {
    let values = of.iter().flat_map(|(_, modes)| modes.values());
    // Room above the tallest for the legend.
    let most = values.copied().fold(1.0, f64::max) * 1.6;
    let modes: BTreeSet<Mode> = of.iter().flat_map(|(_, modes)| modes.keys().copied()).collect();
    let mut svg = String::new();
    let root = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
    root.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&root)
        .margin(14)
        .x_label_area_size(42)
        .y_label_area_size(70)
        .build_cartesian_2d(0.0..of.len() as f64, 0.0..most)?;
    let mut mesh = chart.configure_mesh();
    mesh.disable_x_mesh().disable_x_axis().light_line_style(WHITE).y_desc("times as long as with all local");
    mesh.y_label_formatter(&|value| label(*value)).draw()?;
    let width = 0.8 / modes.len().max(1) as f64;
    for (place, mode) in modes.iter().enumerate() {
        let colour = colour(*mode);
        let drawn = chart.draw_series(of.iter().enumerate().filter_map(|(program, (_, modes))| {
            let left = program as f64 + 0.1 + width * place as f64;
            Some(Rectangle::new([(left, 0.0), (left + width * 0.9, *modes.get(mode)?)], colour.filled()))
        }))?;
        drawn.label(mode.title()).legend(move |(x, y)| Rectangle::new([(x, y - 5), (x + 20, y + 5)], colour.filled()));
    }
    chart.draw_series(of.iter().enumerate().map(|(program, (title, _))| {
        let middle = TextStyle::from(("sans-serif", 13)).pos(Pos::new(HPos::Center, VPos::Top));
        EmptyElement::at((program as f64 + 0.5, 0.0)) + Text::new(shortened(title), (0, 8), middle)
    }))?;
    let one = [(0.0, 1.0), (of.len() as f64, 1.0)];
    chart.draw_series(LineSeries::new(one, BLACK.mix(0.6)))?;
    let place = SeriesLabelPosition::UpperRight;
    chart.configure_series_labels().position(place).background_style(WHITE.mix(0.8)).border_style(BLACK).draw()?;
    root.present()?;
    drop(chart);
    drop(root);
    Ok(svg)
}

/// A title that several fit beside each other.
fn shortened(title: &str) -> String {
    title.chars().take(BAR_CHARACTERS).collect()
}

/// That of a mode in every chart.
fn colour(mode: Mode) -> PaletteColor<Palette99> {
    Palette99::pick(mode as usize)
}

fn by_share(cases: &[&Compared], figure: impl Fn(&Runs, Option<&Runs>) -> Option<f64>) -> Lines {
    let mut lines = Lines::new();
    for case in cases {
        for (mode, runs) in &case.modes {
            if let Some(value) = figure(runs, case.modes.get(&Mode::Native)) {
                lines.entry(*mode).or_default().push((case.case.local_percent as f64, value));
            }
        }
    }
    lines
}

fn shares(lines: &Lines, what: &str) -> Result<String, Box<dyn Error>> {
    let values = || lines.values().flatten().map(|(_, value)| *value).filter(|value| *value > 0.0);
    let (least, most) = (values().fold(f64::MAX, f64::min), values().fold(f64::MIN_POSITIVE, f64::max));
    let axes = Axes {
        x: "local memory, % of what the workload touches",
        y: what,
        from: least / 1.5,
        to: most * 1.5,
        powers: true,
    };
    // Shares end at 75: what is right of them is for the legend.
    draw(lines, &axes, (20.0..109.0).step(10.0))
}

fn latencies(case: &Compared) -> Result<String, Box<dyn Error>> {
    let mut lines = Lines::new();
    for (mode, runs) in &case.modes {
        let all = runs.latencies();
        let mut seen = 0;
        let line = all.iter_recorded().map(|at| {
            seen += at.count_at_value();
            (at.value_iterated_to() as f64 / 1e3, 100.0 * seen as f64 / all.len().max(1) as f64)
        });
        lines.insert(*mode, line.collect());
    }
    let times = || lines.values().flatten().map(|(us, _)| *us);
    let (least, most) = (times().fold(1.0, f64::min), times().fold(10.0, f64::max));
    let axes = Axes { x: "at most so many microseconds", y: "accesses, %", from: 0.0, to: 100.0, powers: false };
    draw(&lines, &axes, (least.max(0.01)..most * 1.1).log_scale())
}

/// Draws lines over a horizontal axis of any kind.
fn draw<X>(lines: &Lines, axes: &Axes<'_>, x: X) -> Result<String, Box<dyn Error>>
where
    X: AsRangedCoord<Value = f64>,
    X::CoordDescType: Ranged<ValueType = f64> + ValueFormatter<f64>,
{
    let y = axes.from..axes.to;
    if axes.powers { draw_over(lines, axes, x, y.log_scale()) } else { draw_over(lines, axes, x, y) }
}

fn draw_over<X, Y>(lines: &Lines, axes: &Axes<'_>, x: X, y: Y) -> Result<String, Box<dyn Error>>
where
    X: AsRangedCoord<Value = f64>,
    X::CoordDescType: Ranged<ValueType = f64> + ValueFormatter<f64>,
    Y: AsRangedCoord<Value = f64>,
    Y::CoordDescType: Ranged<ValueType = f64> + ValueFormatter<f64>,
{
    let mut svg = String::new();
    let root = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
    root.fill(&WHITE)?;
    let mut chart =
        ChartBuilder::on(&root).margin(14).x_label_area_size(42).y_label_area_size(70).build_cartesian_2d(x, y)?;
    chart
        .configure_mesh()
        .light_line_style(WHITE)
        .x_desc(axes.x)
        .y_desc(axes.y)
        .x_label_formatter(&|value| label(*value))
        .y_label_formatter(&|value| label(*value))
        .draw()?;
    for (mode, line) in lines {
        let colour = colour(*mode).stroke_width(2);
        let drawn = chart.draw_series(LineSeries::new(line.iter().copied(), colour))?;
        drawn.label(mode.title()).legend(move |(x, y)| PathElement::new(vec![(x, y), (x + 20, y)], colour));
    }
    let place = if axes.powers { SeriesLabelPosition::UpperRight } else { SeriesLabelPosition::LowerRight };
    chart.configure_series_labels().position(place).background_style(WHITE.mix(0.8)).border_style(BLACK).draw()?;
    root.present()?;
    drop(chart);
    drop(root);
    Ok(svg)
}

/// A number beside an axis.
fn label(value: f64) -> String {
    match value {
        _ if value >= 1e6 => format!("{}M", value / 1e6),
        _ if value >= 1e3 => format!("{}k", value / 1e3),
        _ => format!("{}", (value * 1000.0).round() / 1000.0),
    }
}

#[cfg(test)]
mod tests {
    use super::super::plan::Case;
    use super::super::results::tests::results;
    use super::*;

    #[test]
    fn every_mode_has_its_line() {
        let mut results = results();
        let charts = all(&results).expect("drawn");
        assert_eq!(charts.len(), 1);
        assert!(
            charts[0].svg.starts_with("<svg") && charts[0].svg.contains("spillway") && charts[0].svg.contains("native")
        );
        // Each in the chart and in its legend.
        assert_eq!(charts[0].svg.matches("stroke-width=\"2\"").count(), 4, "{}", charts[0].svg);
        let mut other = super::super::results::tests::results();
        let mut case = other.cases.remove(0);
        case.case = Case { local_percent: 25, ..case.case };
        results.cases.push(case);
        let headings: Vec<String> = all(&results).expect("drawn").into_iter().map(|chart| chart.heading).collect();
        assert_eq!(headings.len(), 4);
        assert_eq!(
            headings[2..],
            ["Throughput by local share: zipf, 30 % writes", "Slowdown by local share: zipf, 30 % writes"]
        );
    }

    #[test]
    fn every_program_has_a_bar_for_every_mode() {
        let mut results = Results::new(&[], &[]);
        results.programs.extend([super::super::programs::tests::timings(), super::super::programs::tests::timings()]);
        let charts = all(&results).expect("drawn");
        assert_eq!(charts.len(), 1);
        assert_eq!(charts[0].heading, "Slowdown by program: 50 % local");
        // Two, and one in the legend; its frame has no colour of a mode.
        let (r, g, b) = colour(Mode::Local).rgb();
        let filled = format!("fill=\"#{r:02X}{g:02X}{b:02X}\"");
        assert_eq!(charts[0].svg.matches(&filled).count(), 3, "{}", charts[0].svg);
        assert_eq!(charts[0].svg.matches("sort &lt;x").count(), 2);
    }

    #[test]
    fn labels_are_short() {
        assert_eq!([label(0.1), label(10.0), label(20_000.0), label(1.5e6)], ["0.1", "10", "20k", "1.5M"]);
    }
}
