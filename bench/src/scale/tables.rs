//! The results of a run as tables of a page.

use super::cluster::{Step, arithmetic, whole};
use super::features::{Costs, Feature, medians, spread};
use super::network::Way;
use super::streams::{PACE, Streams};
use super::{Report, queue::Queue, workers::Workers};

/// The texts between the page's marks, by name.
pub fn texts(report: &Report) -> [(&'static str, String); 3] {
    [("scale", scale(report)), ("features", features(&report.features)), ("cluster", cluster(&arithmetic(report)))]
}

fn scale(report: &Report) -> String {
    let mut text = format!("{}. In {:.0} s", report.machine.describe(), report.seconds);
    if report.quick {
        text.push_str(", a brief run with imprecise figures");
    }
    text.push_str(&format!(
        ". A program may have {} files open. {} responses were compared with the backend's output, {:.1} MB.\n\n",
        if report.open_files == u64::MAX { "any number of".to_owned() } else { whole(report.open_files as f64) },
        whole(report.right as f64),
        report.bytes as f64 / 1e6
    ));
    text.push_str(&lines(report.faults.iter().map(|fault| format!("- **{fault}**\n"))));
    text.push_str(&lines(report.absent.iter().map(|absent| format!("- {absent}\n"))));
    if let Some(workers) = &report.workers {
        text.push_str(&rows(&format!("{} idle workers", whole(f64::from(workers.count))), &of_workers(workers)));
    }
    text.push_str(&of_streams(&report.streams));
    if let Some(queue) = &report.queue {
        text.push_str(&rows(&format!("{} waiting requests", whole(f64::from(queue.count))), &of_queue(queue)));
    }
    text.push_str(&of_throughput(&report.throughput));
    text.push_str(&of_network(&report.network));
    text
}

fn lines(lines: impl Iterator<Item = String>) -> String {
    let text: String = lines.collect();
    if text.is_empty() { text } else { text + "\n" }
}

/// A table with a title and two columns.
fn rows(title: &str, rows: &[(&str, String)]) -> String {
    let rows: String = rows.iter().map(|(what, value)| format!("| {what} | {value} |\n")).collect();
    format!("| {title} | |\n|---|---:|\n{rows}\n")
}

fn of_workers(workers: &Workers) -> Vec<(&'static str, String)> {
    vec![
        ("the relay's memory for one", format!("{:.1} KiB", workers.kib)),
        ("its processor time for one", format!("{:.5} % of a core", workers.cpu_percent)),
        ("its processor time for one heartbeat", format!("{:.0} µs", workers.heartbeat_micros)),
        ("and for a handshake with registration", format!("{:.0} µs", workers.handshake_micros)),
        (
            "its metrics with all of them: size, processor time",
            format!("{:.0} KiB, {:.1} ms", workers.scrape_kib, workers.scrape_cpu_ms),
        ),
        ("the relay is killed; another listens on its port after", format!("{:.0} ms", workers.away_ms)),
        ("all workers are attached again after", format!("{:.1} s", workers.back_seconds)),
        ("one of them, half and 99 of 100 of them after", quantiles(workers.back.p50_ms, workers.back.p99_ms)),
        ("dials that failed meanwhile", whole(f64::from(workers.failed_dials))),
        ("the new relay's processor time for each that returned", format!("{:.0} µs", workers.return_micros)),
        ("its memory for one", format!("{:.1} KiB", workers.return_kib)),
    ]
}

fn quantiles(p50_ms: f64, p99_ms: f64) -> String {
    format!("{p50_ms:.0} ms, {p99_ms:.0} ms")
}

fn of_streams(streams: &[Streams]) -> String {
    let (Some(direct), Some(ours)) =
        (streams.iter().find(|streams| !streams.is_relayed), streams.iter().find(|streams| streams.is_relayed))
    else {
        return String::new();
    };
    let pair =
        |value: fn(&Streams) -> f64, digits: usize| format!("{:.digits$} | {:.digits$}", value(direct), value(ours));
    let both = |relay: f64, worker: f64, digits: usize| format!("– | {relay:.digits$} + {worker:.digits$}");
    let gaps = format!("between two tokens, 99 of 100, ms ({} ms apart)", PACE.as_millis());
    let rows = [
        ("first token, half of them after, ms", pair(|streams| streams.first_event.p50_ms, 2)),
        ("99 of 100 after, ms", pair(|streams| streams.first_event.p99_ms, 2)),
        (gaps.as_str(), pair(|streams| streams.gaps.p99_ms, 1)),
        ("tokens, each compared", pair(|streams| streams.events as f64, 0)),
        ("memory of a stream, relay + worker, KiB", both(ours.relay_kib, ours.worker_kib, 1)),
        ("processor time of a token, relay + worker, µs", both(ours.relay_micros, ours.worker_micros, 1)),
    ];
    let rows: String = rows.iter().map(|(what, value)| format!("| {what} | {value} |\n")).collect();
    format!("| {} streams at once | direct | modelrelay |\n|---|---:|---:|\n{rows}\n", whole(f64::from(ours.count)))
}

fn of_queue(queue: &Queue) -> Vec<(&'static str, String)> {
    vec![
        ("arrived per second", whole(queue.a_second)),
        ("the relay's processor time for one, with its connection", format!("{:.0} µs", queue.submit_micros)),
        ("its memory for one, with its connection", format!("{:.1} KiB", queue.kib)),
        ("clients that disconnected at once", whole(f64::from(queue.left))),
        ("their requests had left the queue after", format!("{:.0} ms", queue.leave_ms)),
        ("the relay's processor time for one disconnect", format!("{:.0} µs", queue.leave_micros)),
        ("timed out", whole(f64::from(queue.expired))),
        ("late, half and 99 of 100 of them by", quantiles(queue.late.p50_ms, queue.late.p99_ms)),
        ("the relay's processor time for one of these", format!("{:.0} µs", queue.expire_micros)),
    ]
}

fn of_throughput(throughput: &[(u32, f64)]) -> String {
    if throughput.is_empty() {
        return String::new();
    }
    let rows: String = throughput.iter().map(|(count, value)| format!("| {count} | {} |\n", whole(*value))).collect();
    format!("| workers, 4 requests of 20 ms at once each | responses per second |\n|---:|---:|\n{rows}\n")
}

fn of_network(network: &[Way]) -> String {
    if network.is_empty() {
        return String::new();
    }
    let rows: String = network
        .iter()
        .map(|way| {
            format!(
                "| {} | {:.3} | {:.2} | {:.2} | {} of {} |\n",
                if way.is_relayed { "modelrelay" } else { "direct" },
                way.alone_p50_ms,
                way.first_p50_ms,
                way.first_p99_ms,
                way.stalls,
                way.first_events
            )
        })
        .collect();
    format!(
        "| client, relay and worker in networks of their own | one at a time, p50 ms | first token p50 ms | p99 ms | after 35–50 ms |\n\
         |---|---:|---:|---:|---:|\n{rows}\n"
    )
}

fn features(rounds: &[Costs]) -> String {
    let medians = medians(rounds);
    if medians.is_empty() {
        return "It was not measured.\n".to_owned();
    }
    let rows: String = medians.iter().map(|costs| feature(costs, &medians)).collect();
    let mut text = format!(
        "| | CPU µs/request | of that the relay | CPU µs/token, paced | of that the relay | one at a time, p50 ms |\n\
         |---|---:|---:|---:|---:|---:|\n{rows}"
    );
    let of_plain = |value| spread(rounds, Feature::Plain, value);
    if let (Some(request), Some(chunk)) = (of_plain(|costs| costs.request_micros), of_plain(|costs| costs.chunk_micros))
    {
        text.push_str(&format!(
            "\nThe rounds of the first row lie {:.0} % apart, and {:.0} % for tokens: smaller differences are not significant.\n",
            request * 100.0,
            chunk * 100.0
        ));
    }
    text
}

fn feature(costs: &Costs, all: &[Costs]) -> String {
    let base = all.iter().find(|base| base.feature == costs.feature.base() && base.feature != costs.feature);
    let cell = |value: fn(&Costs) -> f64, digits: usize| {
        let own = value(costs);
        let difference = base.map(|base| {
            let base = value(base);
            format!(" ({:+.0} %)", (own - base) * 100.0 / base)
        });
        format!("{own:.digits$}{}", difference.unwrap_or_default())
    };
    let is_played = matches!(costs.feature, Feature::Played | Feature::Text);
    // The usage of a played worker belongs to the benchmark.
    let together = |value: fn(&Costs) -> f64| if is_played { "–".to_owned() } else { cell(value, 1) };
    format!(
        "| {} | {} | {} | {} | {} | {} |\n",
        name(costs.feature),
        together(|costs| costs.request_micros),
        cell(|costs| costs.relay_request_micros, 1),
        together(|costs| costs.chunk_micros),
        cell(|costs| costs.relay_chunk_micros, 1),
        cell(|costs| costs.alone_p50_ms, 3),
    )
}

fn name(feature: Feature) -> &'static str {
    match feature {
        Feature::Plain => "**plain**: one relay, one worker, none of these",
        Feature::Keys => "API keys required",
        Feature::Scraped => "metrics of both read every second",
        Feature::Multiplexer => "a worker with a multiplexer, driver `static`, one model",
        Feature::TwoRelays => "two relays, half of the clients each",
        Feature::Played => "**a worker played by the benchmark**, current protocol",
        Feature::Text => "the same with the earlier protocol, text only",
    }
}

fn cluster(steps: &[Step]) -> String {
    if steps.is_empty() {
        return "It was not measured.\n".to_owned();
    }
    let row = |step: &Step| format!("| {} | {} | {} |\n", step.what, step.from, step.result);
    format!("| | from | |\n|---|---|---:|\n{}", steps.iter().map(row).collect::<String>())
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::machine::Machine;
    use crate::samples::Summary;
    use crate::scale::Extent;

    fn costs(feature: Feature, times: f64) -> Costs {
        Costs {
            feature,
            alone_p50_ms: 0.2 * times,
            request_micros: 50.0 * times,
            relay_request_micros: 30.0 * times,
            chunk_micros: 10.0 * times,
            relay_chunk_micros: 5.0 * times,
        }
    }

    fn workers() -> Workers {
        Workers {
            count: 10_000,
            connected_seconds: 3.0,
            handshake_micros: 180.0,
            kib: 8.0,
            cpu_percent: 0.0004,
            heartbeats: 20_000,
            heartbeat_micros: 60.0,
            scrape_cpu_ms: 2.0,
            scrape_kib: 40.0,
            away_ms: 20.0,
            back_seconds: 4.0,
            back: Summary::default(),
            failed_dials: 7,
            return_micros: 200.0,
            return_kib: 9.0,
        }
    }

    fn streams(is_relayed: bool) -> Streams {
        let (first_event, gaps) = (Summary { p99_ms: 3.5, ..Summary::default() }, Summary::default());
        let (relay_kib, worker_kib, relay_micros, worker_micros) = (12.0, 9.0, 10.0, 8.0);
        Streams {
            is_relayed,
            count: 5000,
            events: 100_000,
            first_event,
            gaps,
            relay_kib,
            worker_kib,
            relay_micros,
            worker_micros,
        }
    }

    /// A report in which everything was measured.
    pub(in crate::scale) fn report() -> Report {
        Report {
            machine: Machine {
                cpu: "A CPU".into(),
                cores: 2,
                kernel: "6.1".into(),
                load_before: 0.5,
                date: "2026-01-01".into(),
            },
            open_files: 20_000,
            quick: false,
            extent: Extent::FULL,
            seconds: 200.0,
            workers: Some(workers()),
            streams: vec![streams(false), streams(true)],
            queue: Some(Queue {
                count: 15_000,
                a_second: 5000.0,
                submit_micros: 90.0,
                kib: 6.0,
                left: 7500,
                leave_ms: 300.0,
                leave_micros: 30.0,
                expired: 7500,
                late: Summary::default(),
                expire_micros: 40.0,
            }),
            throughput: vec![(1, 190.0), (8, 1500.0)],
            network: vec![],
            features: vec![costs(Feature::Plain, 1.0), costs(Feature::Keys, 1.1), costs(Feature::Played, 3.0)],
            right: 12,
            bytes: 4_000_000,
            absent: vec!["Network: no network namespaces".into()],
            faults: vec![],
        }
    }

    #[test]
    fn every_part_has_table_and_gaps_are_noted() {
        let text = scale(&report());
        for line in [
            "| 10,000 idle workers | |",
            "| all workers are attached again after | 4.0 s |",
            "| 5,000 streams at once | direct | modelrelay |",
            "| 99 of 100 after, ms | 3.50 | 3.50 |",
            "| memory of a stream, relay + worker, KiB | – | 12.0 + 9.0 |",
            "| 15,000 waiting requests | |",
            "| 8 | 1,500 |",
            "- Network: no network namespaces",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is missing in {text}");
        }
    }

    #[test]
    fn feature_is_compared_with_its_baseline() {
        let text = features(&report().features);
        let of = |begin: &str| text.lines().find(|line| line.starts_with(begin)).unwrap_or_else(|| panic!("{text}"));
        assert!(of("| **plain**").ends_with("| 50.0 | 30.0 | 10.0 | 5.0 | 0.200 |"));
        assert!(
            of("| API keys").ends_with("| 55.0 (+10 %) | 33.0 (+10 %) | 11.0 (+10 %) | 5.5 (+10 %) | 0.220 (+10 %) |")
        );
        assert!(of("| **a worker played").ends_with("| – | 90.0 | – | 15.0 | 0.600 |"));
        assert!(!text.contains("apart"), "one round says nothing of noise: {text}");
    }

    #[test]
    fn features_show_median_and_spread_of_rounds() {
        let rounds = [1.0, 3.0, 1.2].map(|times| costs(Feature::Plain, times));
        let text = features(&rounds);
        assert!(text.contains("| 60.0 | 36.0 | 12.0 | 6.0 | 0.240 |"), "{text}");
        assert!(text.contains("lie 200 % apart"), "{text}");
    }
}
