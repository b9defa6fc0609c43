//! The results of a run as tables of a page.

use crate::figures::{Figure, Medians};
use crate::run::Report;
use crate::systems::System;
use crate::verdicts::{Condition, GoalResult, all_hold};

/// Columns of the table of all systems: title, figure, digits behind the point.
const COLUMNS: [(&str, Figure, usize); 13] = [
    ("one at a time, p50 ms", Figure::AloneP50, 3),
    ("32 clients, req/s", Figure::Requests, 0),
    ("CPU µs/req", Figure::CpuPerRequest, 1),
    ("first token p50 ms", Figure::FirstEventP50, 2),
    ("p99 ms", Figure::FirstEventP99, 2),
    ("35–50 ms", Figure::Stalls, 0),
    ("CPU µs/token, paced", Figure::CpuPerPacedChunk, 1),
    ("tokens/s", Figure::Chunks, 0),
    ("CPU µs/token", Figure::CpuPerChunk, 2),
    ("KiB/stream", Figure::StreamKib, 1),
    ("CPU µs, 220 kB prompt", Figure::CpuPerLongPrompt, 0),
    ("CPU ms, 20 MB prompt", Figure::CpuPerHugePrompt, 1),
    ("CPU µs/abort", Figure::CpuPerAbort, 0),
];

/// Rows of the table of ModelRelay alone: text, figure, digits, unit.
const OURS: [(&str, Figure, usize, &str); 29] = [
    ("the relay's part of a paced token", Figure::RelayCpuPerPacedChunk, 1, "µs"),
    ("an idle worker: the relay's memory", Figure::IdleWorkerKib, 1, "KiB"),
    ("an idle worker: the relay's processor time", Figure::IdleWorkerCpu, 4, "% of a core"),
    ("mean processor time of a dispatch among 10 workers", Figure::DispatchFew, 0, "ns"),
    ("among the most workers", Figure::DispatchMany, 0, "ns"),
    ("dispatch with 10 waiting, 99 of 100", Figure::QueueShort, 0, "ns"),
    ("dispatch with the most waiting, 99 of 100", Figure::QueueLong, 0, "ns"),
    ("dispatch with 10 of 50 models, 99 of 100", Figure::QueueShortModels, 0, "ns"),
    ("dispatch with the most of 50 models, 99 of 100", Figure::QueueLongModels, 0, "ns"),
    ("submission that waits, with 10 waiting, 99 of 100", Figure::SubmitShort, 0, "ns"),
    ("submission that waits, with the most waiting, 99 of 100", Figure::SubmitLong, 0, "ns"),
    ("submission that waits, with 10 of 50 models, 99 of 100", Figure::SubmitShortModels, 0, "ns"),
    ("submission that waits, with the most of 50 models, 99 of 100", Figure::SubmitLongModels, 0, "ns"),
    ("cancellation, anywhere in the queue, with 10 waiting, 99 of 100", Figure::CancelShort, 0, "ns"),
    ("cancellation, anywhere in the queue, with the most waiting, 99 of 100", Figure::CancelLong, 0, "ns"),
    ("cancellation, anywhere in the queue, with 10 of 50 models, 99 of 100", Figure::CancelShortModels, 0, "ns"),
    ("cancellation, anywhere in the queue, with the most of 50 models, 99 of 100", Figure::CancelLongModels, 0, "ns"),
    ("expiry, with 10 waiting, 99 of 100", Figure::ExpireShort, 0, "ns"),
    ("expiry, with the most waiting, 99 of 100", Figure::ExpireLong, 0, "ns"),
    ("expiry, with 10 of 50 models, 99 of 100", Figure::ExpireShortModels, 0, "ns"),
    ("expiry, with the most of 50 models, 99 of 100", Figure::ExpireLongModels, 0, "ns"),
    ("responses per second of 1 worker", Figure::Workers1, 0, ""),
    ("of 2 workers", Figure::Workers2, 0, ""),
    ("of 4 workers", Figure::Workers4, 0, ""),
    ("of 8 workers", Figure::Workers8, 0, ""),
    ("a client that stops reading: memory", Figure::SlowClientKib, 0, "KiB"),
    ("the most before it settled", Figure::SlowClientPeakKib, 0, "KiB"),
    ("until the relay listens", Figure::ColdStart, 0, "ms"),
    ("memory of a relay with nothing to do", Figure::IdleRelayMb, 1, "MB"),
];

/// Stands for a figure that was not measured.
const NOTHING: &str = "–";

/// The whole report, as Markdown.
pub fn markdown(report: &Report) -> String {
    let medians = Medians::of(&report.turns);
    let mut text = format!("{}. Medians of {} rounds", report.machine.describe(), report.rounds);
    if report.quick {
        text.push_str(", brief ones with imprecise figures");
    }
    text.push_str(&format!(
        ". {} responses were compared with the backend's output, {:.1} MB.\n\n",
        report.right(),
        report.bytes() as f64 / 1e6
    ));
    text.push_str(&systems(report, &medians));
    text.push_str(&absent(report));
    text.push_str(&modelrelay_table(&medians));
    text.push_str(&goals(&report.verdicts));
    text
}

/// Contains only the columns with measurements: a run may have been limited to some parts.
fn systems(report: &Report, medians: &Medians) -> String {
    let measured = |figure| report.systems.iter().any(|(system, _)| medians.value(*system, figure).is_some());
    let columns: Vec<_> = COLUMNS.iter().filter(|(_, figure, _)| measured(*figure)).collect();
    if columns.is_empty() {
        return String::new();
    }
    let mut text = row("", columns.iter().map(|(title, ..)| (*title).to_owned()));
    text.push_str(&row("---", columns.iter().map(|_| "---:".to_owned())));
    for (system, version) in &report.systems {
        let name = format!("{} {version}", system.name());
        let cells = columns.iter().map(|(_, figure, digits)| {
            let cell = medians.value(*system, *figure).map_or(NOTHING.to_owned(), |value| format!("{value:.digits$}"));
            // The usage of direct is the backend's, which no other figure contains.
            let of_backend = *system == System::Direct && is_processor_time(*figure) && cell != NOTHING;
            if of_backend { format!("({cell})") } else { cell }
        });
        text.push_str(&row(name.trim_end(), cells));
    }
    text.push('\n');
    text
}

fn is_processor_time(figure: Figure) -> bool {
    use Figure::{CpuPerAbort, CpuPerChunk, CpuPerHugePrompt, CpuPerLongPrompt, CpuPerPacedChunk, CpuPerRequest};
    [CpuPerRequest, CpuPerPacedChunk, CpuPerChunk, CpuPerLongPrompt, CpuPerHugePrompt, CpuPerAbort].contains(&figure)
}

/// Lists the systems without a row, and the cells that are empty for a reason.
fn absent(report: &Report) -> String {
    let mut lines: Vec<String> = Vec::new();
    for absent in &report.absent {
        lines.push(format!("- {} was not measured: {}\n", absent.system.name(), absent.reason));
    }
    for turn in &report.turns {
        for fault in &turn.faults {
            lines.push(format!("- {}, round {}: {fault}\n", turn.system.name(), turn.round));
        }
    }
    if !lines.is_empty() {
        lines.push("\n".to_owned());
    }
    lines.concat()
}

fn modelrelay_table(medians: &Medians) -> String {
    let rows: Vec<_> = OURS
        .iter()
        .filter_map(|(what, figure, digits, unit)| {
            let value = medians.of_modelrelay(*figure)?;
            Some(format!("| {what} | {} |\n", format!("{value:.digits$} {unit}").trim_end()))
        })
        .collect();
    if rows.is_empty() {
        return String::new();
    }
    format!("| of relay and worker alone | |\n|---|---:|\n{}\n", rows.concat())
}

fn goals(verdicts: &[GoalResult]) -> String {
    let mut text = "| goal | about | must | stretch |\n|---|---|---|---|\n".to_owned();
    for verdict in verdicts {
        let (must, stretch) = (conditions(&verdict.must), conditions(&verdict.stretch));
        text.push_str(&format!("| {} | {} | {must} | {stretch} |\n", verdict.goal, verdict.about));
    }
    text
}

fn conditions(conditions: &[Condition]) -> String {
    let word = match all_hold(conditions) {
        Some(true) => "**holds**",
        Some(false) => "**does not hold**",
        None => "not measured",
    };
    let each = conditions.iter().map(|condition| match (condition.measured, condition.holds) {
        (Some(value), Some(false)) => format!("{}: **{}**", condition.text, short(value)),
        (Some(value), _) => format!("{}: {}", condition.text, short(value)),
        (None, _) => format!("{}: {NOTHING}", condition.text),
    });
    format!("{word}<br>{}", each.collect::<Vec<_>>().join("<br>"))
}

/// Three significant digits, and all digits of a large number.
fn short(value: f64) -> String {
    match value.abs() {
        size if size >= 100.0 => format!("{value:.0}"),
        size if size >= 1.0 => format!("{value:.2}"),
        _ => format!("{value:.4}"),
    }
}

fn row(first: &str, cells: impl Iterator<Item = String>) -> String {
    format!("| {first} | {} |\n", cells.collect::<Vec<_>>().join(" | "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::figures::{Absent, Figures, Turn};
    use crate::machine::Machine;
    use crate::scenarios::Extent;
    use crate::verdicts::verdicts;

    fn report() -> Report {
        let turn = |system, alone| Turn {
            system,
            round: 1,
            figures: Figures::from([(Figure::AloneP50, alone), (Figure::CpuPerRequest, 7.0)]),
            right: 10,
            bytes: 3450,
            faults: Vec::new(),
        };
        let mut ours = turn(System::Modelrelay, 0.2);
        ours.figures.insert(Figure::ColdStart, 12.3);
        ours.figures.insert(Figure::FirstEventP50, 1.5);
        ours.faults.push("Memory: it did not fit".into());
        let turns = vec![turn(System::Direct, 0.1), ours];
        Report {
            machine: Machine {
                cpu: "A CPU".into(),
                cores: 2,
                kernel: "6.1".into(),
                load_before: 0.5,
                date: "2026-01-01".into(),
            },
            rounds: 1,
            quick: false,
            extent: Extent::QUICK,
            systems: vec![(System::Direct, String::new()), (System::Modelrelay, "0.1.0".into())],
            absent: vec![Absent { system: System::Nginx, reason: "not installed: nginx is not in PATH".into() }],
            verdicts: verdicts(&Medians::of(&turns)),
            turns,
        }
    }

    #[test]
    fn every_system_has_row_with_measured_cells() {
        let text = markdown(&report());
        let of = |begin: &str| text.lines().find(|line| line.starts_with(begin)).unwrap_or_else(|| panic!("{text}"));
        assert_eq!(
            of("|  |"),
            "|  | one at a time, p50 ms | CPU µs/req | first token p50 ms |",
            "rows without a value are left out"
        );
        assert_eq!(of("| direct"), "| direct (the backend itself) | 0.100 | (7.0) | – |");
        assert_eq!(of("| **modelrelay**"), "| **modelrelay** (relay and worker) 0.1.0 | 0.200 | 7.0 | 1.50 |");
        assert!(text.contains("| until the relay listens | 12 ms |"));
        assert!(text.contains("20 responses were compared"), "{text}");
    }

    #[test]
    fn system_without_row_is_listed_with_reason() {
        let text = markdown(&report());
        assert!(
            text.contains("nginx, 1 worker, proxy_buffering off was not measured: not installed: nginx is not in PATH")
        );
        assert!(text.contains("round 1: Memory: it did not fit"));
    }

    #[test]
    fn goals_show_their_verdicts() {
        let text = markdown(&report());
        let first = text.lines().find(|line| line.starts_with("| P1 |")).unwrap();
        assert!(first.contains("not measured<br>median, × direct, at most 3.5: 2.00<br>"), "{first}");
        assert!(text.lines().any(|line| line.starts_with("| P12 |") && line.contains("12.30")), "{text}");
    }
}
