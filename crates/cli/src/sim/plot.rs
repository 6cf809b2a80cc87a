//! Draws miss ratios by local memory.

use super::report::{Case, Report};
use crate::failure::{FAILED, Failure};
use crate::say;
use plotters::prelude::*;
use spillway_core::size::Bytes;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

const SIZE: (u32, u32) = (800, 500);

/// Draws a line for each policy, scheme and block.
pub(super) fn draw(path: &Path, report: &Report) -> Result<(), Failure> {
    let mut svg = String::new();
    lines(&mut svg, report).map_err(|error| Failure::new(FAILED, format!("the chart could not be drawn: {error}")))?;
    std::fs::write(path, svg).map_err(|error| {
        let (path, why) = (say::clean(&path.to_string_lossy()), say::error(&error));
        Failure::refused(format!("cannot write {path}: {why}; give --plot another file"))
    })
}

fn lines(svg: &mut String, report: &Report) -> Result<(), Box<dyn std::error::Error>> {
    let (schemes, blocks) = (differ(report, |case| case.evict), differ(report, |case| case.block));
    let mut points: BTreeMap<String, BTreeMap<u64, f64>> = BTreeMap::new();
    for case in &report.cases {
        let words = [Some(case.policy), case.evict.filter(|_| schemes), case.block.filter(|_| blocks)];
        let name = words.into_iter().flatten().collect::<Vec<_>>().join(" ");
        points.entry(name).or_default().insert(case.local_bytes, 100.0 * case.miss_ratio);
    }
    let most_bytes = report.cases.iter().map(|case| case.local_bytes).max().unwrap_or(1);
    let most = points.values().flat_map(|line| line.values()).fold(f64::EPSILON, |most, ratio| most.max(*ratio));
    let root = SVGBackend::with_string(svg, SIZE).into_drawing_area();
    root.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&root)
        .margin(16)
        .x_label_area_size(44)
        .y_label_area_size(64)
        .build_cartesian_2d(0..most_bytes + most_bytes / 20, 0.0..most * 1.05)?;
    chart
        .configure_mesh()
        .x_desc("local memory")
        .y_desc("references that miss, %")
        .x_label_formatter(&|bytes| Bytes(*bytes).to_string())
        .draw()?;
    for (number, (policy, line)) in points.into_iter().enumerate() {
        let colour = Palette99::pick(number).stroke_width(2);
        let sample = colour;
        chart
            .draw_series(LineSeries::new(line, colour))?
            .label(policy)
            .legend(move |(x, y)| PathElement::new(vec![(x, y), (x + 20, y)], sample));
    }
    chart.configure_series_labels().background_style(WHITE).border_style(BLACK).draw()?;
    root.present()?;
    Ok(())
}

/// Whether cases differ in that: then names say it.
fn differ(report: &Report, of: impl Fn(&Case) -> Option<&'static str>) -> bool {
    report.cases.iter().filter_map(of).collect::<BTreeSet<_>>().len() > 1
}
