//! Results as one page that needs nothing else: no script, no style sheet, no picture from elsewhere.

use super::charts::Chart;
use super::machine::Machine;
use super::modes::Mode;
use super::programs::Timings;
use super::results::{Compared, Results, SHOWN};
use super::table::{EXCESS, number, spread};
use std::fmt::Write;

const STYLE: &str = "body{font:15px/1.5 system-ui,sans-serif;max-width:76em;margin:2em auto;padding:0 1em;color:#222}\
table{border-collapse:collapse;margin:.6em 0 1.6em;font-size:13px}td,th{padding:.25em .7em;border-bottom:1px solid #ddd;\
text-align:right;white-space:nowrap}td:first-child,th:first-child{text-align:left}.ours{background:#f2f8ff}small{color:#777}\
figure{display:inline-block;margin:.5em 1em 1em 0;vertical-align:top}figcaption{font-weight:600}svg{max-width:100%;height:auto}\
.bad{color:#b00020;font-weight:600}";

/// The page.
pub(super) fn page(results: &Results, charts: &[Chart], machine: &Machine) -> String {
    let mut html = format!(
        "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>spillway bench</title><style>{STYLE}</style></head>\
         <body>\n<h1>What Spillway costs and gives on this machine</h1>\n<p>{}</p>\n",
        escape(&machine.line())
    );
    let _ =
        writeln!(html, "<p>Rounds: {}, everything in turn. A ratio is of two runs of one round.</p>", results.rounds());
    if !results.cases.is_empty() {
        html += &format!(
            "<p>One program touches {} in a known order and verifies what it reads: with all of its memory local, under the kernel's \
             swap, and under Spillway. Medians; between which values the rounds were stands below in small. Microseconds but for \
             accesses per second.</p>\n",
            escape(&machine.size),
        );
        let wrong = results.wrong();
        let class = if wrong > 0 { " class=\"bad\"" } else { "" };
        let _ = writeln!(html, "<p{class}>Words and pages that came back wrong: {wrong}.</p>");
    }
    if !results.programs.is_empty() {
        html += &format!(
            "<p>Programs of yours: how many times as long they take as with all of their memory local, median and spread. {}</p>\n",
            escape(EXCESS)
        );
        results.unverified_words().iter().for_each(|words| html += &format!("<p>{}</p>\n", escape(words)));
    }
    results.repeated_words().iter().for_each(|words| html += &format!("<p>{words}</p>\n"));
    if !results.remarks.is_empty() {
        html += "<ul>";
        results.remarks.iter().for_each(|remark| html += &format!("<li>{}</li>", escape(remark)));
        html += "</ul>\n";
    }
    results.cases.iter().for_each(|case| html += &table(case));
    results.programs.iter().for_each(|program| html += &slowdowns(program));
    for Chart { heading, svg } in charts {
        let _ = writeln!(html, "<figure><figcaption>{}</figcaption>{svg}</figure>", escape(heading));
    }
    html + "</body></html>\n"
}

fn table(case: &Compared) -> String {
    let yardsticks: Vec<Mode> =
        [Mode::Native, Mode::Zram, Mode::Base].into_iter().filter(|mode| case.modes.contains_key(mode)).collect();
    let mut html = format!("<h2>{}</h2>\n<table><tr><th></th>", escape(&case.case.title()));
    SHOWN.iter().for_each(|(_, heading, _)| html += &format!("<th>{heading}</th>"));
    yardsticks.iter().for_each(|mode| html += &format!("<th>mean to {}</th>", mode.name()));
    html += "</tr>\n";
    for (mode, runs) in &case.modes {
        html += &format!("<tr{}><td>{}</td>", ours(*mode), mode.title());
        for (_, _, figure) in SHOWN {
            let cell = runs.median(figure).map_or("-".into(), |of| {
                format!("{}<br><small>{}..{}</small>", number(of.median), number(of.min), number(of.max))
            });
            html += &format!("<td>{cell}</td>");
        }
        for other in &yardsticks {
            let to = case.modes.get(other).filter(|_| other != mode);
            let cell = to.and_then(|to| runs.ratio(to, |of| of.mean_us)).map_or(String::new(), spread);
            html += &format!("<td>{cell}</td>");
        }
        html += "</tr>\n";
    }
    html + "</table>\n"
}

fn slowdowns(program: &Timings) -> String {
    let mut html = format!("<h2>{}</h2>\n<table>", escape(&program.heading()));
    let shares = || program.shares.keys().rev();
    for (heading, modes) in program.tables() {
        html += &format!("<tr><th>{heading}</th>");
        shares().for_each(|share| html += &format!("<th>{share} % local</th>"));
        html += "</tr>\n";
        for (mode, by_share) in modes {
            html += &format!("<tr{}><td>{}</td>", ours(mode), mode.title());
            shares().for_each(|share| {
                html += &format!("<td>{}</td>", by_share.get(share).copied().map_or("-".into(), spread));
            });
            html += "</tr>\n";
        }
    }
    html + "</table>\n"
}

/// How the row of a mode is marked.
fn ours(mode: Mode) -> &'static str {
    if mode.is_kernel() || mode == Mode::Native { "" } else { " class=\"ours\"" }
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::super::{charts, results::tests::results};
    use super::*;

    #[test]
    fn the_page_needs_nothing_else() {
        let mut results = results();
        results.remarks.push("kernel swap: <no> \"zram\"".into());
        let page = page(&results, &charts::all(&results).expect("drawn"), &Machine::examine(64 << 20));
        let foreign = page.replace("http://www.w3.org/2000/svg", "");
        for link in ["http:", "https:", "//", "src=", "href=", "url(", "@import", "<script", "<link", "<iframe"] {
            assert!(!foreign.contains(link), "{link}");
        }
        assert!(page.contains("&lt;no&gt; &quot;zram&quot;") && page.contains("4.00 (3.00..5.00)"), "{page}");
        assert_eq!(page.matches("<svg").count(), 1);
        results.programs.push(super::super::programs::tests::timings());
        let page = super::page(&results, &charts::all(&results).expect("drawn"), &Machine::examine(64 << 20));
        assert!(
            page.contains("<h2>sort &lt;x | wc: 64.0 MiB of memory, 2.00 s") && page.contains("3.00 (3.00..3.00)"),
            "{page}"
        );
        assert!(
            page.contains("<th>excess run time</th><th>50 % local</th></tr>\n<tr class=\"ours\"><td>spillway</td><td>2.00 (2.00..2.00)</td>"),
            "{page}"
        );
        assert!(page.contains(&escape(EXCESS)) && !page.contains("excess by zram"), "{page}");
        assert_eq!(page.matches("<svg").count(), 2);
        results.programs = vec![super::super::programs::tests::beside_zram(&[(2.0, Some(4.0), 3.0)])];
        let page = super::page(&results, &charts::all(&results).expect("drawn"), &Machine::examine(64 << 20));
        let row = "<th>excess by zram's</th><th>25 % local</th></tr>\n<tr class=\"ours\"><td>spillway</td><td>0.50 (0.50..0.50)</td>";
        assert!(page.contains(row), "{page}");
    }
}
