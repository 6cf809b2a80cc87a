//! Results as charts, in SVG.

use super::modes::Mode;
use super::results::{Compared, Results, Runs};
use plotters::coord::ranged1d::{AsRangedCoord, ValueFormatter};
use plotters::prelude::*;
use std::collections::BTreeMap;
use std::error::Error;

const SIZE: (u32, u32) = (720, 380);
/// What the lines of a chart are: by mode, points from left to right.
type Lines = BTreeMap<Mode, Vec<(f64, f64)>>;

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
    Ok(charts)
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
        let colour = Palette99::pick(*mode as usize).stroke_width(2);
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
    fn labels_are_short() {
        assert_eq!([label(0.1), label(10.0), label(20_000.0), label(1.5e6)], ["0.1", "10", "20k", "1.5M"]);
    }
}
