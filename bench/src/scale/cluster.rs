//! The measurements multiplied by a hundred: the number of relays that a million workers need, and the load of each.
//!
//! A worker links to every relay behind the name that it dials, so more relays behind one name do not reduce the workers of
//! any
//! relay. Only another name does. Relays and workers with one name are a *cell* here, and a cell has two relays, so that
//! one may
//! restart.

use super::Report;

/// The factor.
pub const TIMES: f64 = 100.0;

/// The connections of one relay's listener for workers before `MAX_CONNECTIONS` (65,536) has to be raised, with room to
/// grow.
pub const WORKERS_A_CELL: f64 = 50_000.0;

const RELAYS_A_CELL: f64 = 2.0;

/// Seconds between two heartbeats, the default of `HEARTBEAT_INTERVAL`.
const HEARTBEAT: f64 = 15.0;

/// The reading speed of people, and a little more.
const TOKENS_A_SECOND: f64 = 20.0;

const KIB_A_GIB: f64 = 1024.0 * 1024.0;

/// One step of the calculation.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    /// The quantity.
    pub what: String,
    /// Its calculation.
    pub from: String,
    /// The result, with its unit.
    pub result: String,
}

fn step(what: &str, from: String, result: String) -> Step {
    Step { what: what.to_owned(), from, result }
}

/// All steps whose figures were measured.
pub fn arithmetic(report: &Report) -> Vec<Step> {
    let Some(workers) = &report.workers else { return Vec::new() };
    let all = f64::from(workers.count) * TIMES;
    let cell = WORKERS_A_CELL.min(all);
    let cells = (all / cell).ceil();
    let relays = cells * RELAYS_A_CELL;
    let beats = cell / HEARTBEAT;
    let (memory, beat, back) = (workers.kib, workers.heartbeat_micros, workers.return_micros);
    let pace = f64::from(workers.count) / workers.back_seconds;
    let mut steps = vec![
        step(
            "relays",
            format!("{} workers ÷ {} a cell × {RELAYS_A_CELL} relays", whole(all), whole(cell)),
            whole(relays),
        ),
        step("a relay's links to workers", "each worker of its cell".to_owned(), whole(cell)),
        step("its memory for them", format!("× {memory:.1} KiB"), gib(cell * memory)),
        step(
            "its heartbeats",
            format!("÷ {HEARTBEAT} s; × {beat:.0} µs of processor time"),
            format!("{} a second, {:.0} % of a core", whole(beats), beats * beat / 1e4),
        ),
        step("heartbeats of all relays", format!("× {}", whole(relays)), format!("{} a second", whole(beats * relays))),
        step(
            "handshakes after its restart",
            format!("× {back:.0} µs of processor time"),
            format!("{:.0} s of a core", cell * back / 1e6),
        ),
        step(
            "until all of them are back",
            format!("as fast as here, {} a second", whole(pace)),
            format!("{:.0} s", cell / pace),
        ),
    ];
    steps.extend(streams(report, relays));
    steps.extend(queue(report, relays));
    steps
}

fn streams(report: &Report, relays: f64) -> Vec<Step> {
    let Some(measured) = report.streams.iter().find(|streams| streams.is_relayed) else { return Vec::new() };
    let all = f64::from(measured.count) * TIMES;
    let (each, tokens) = (all / relays, all / relays * TOKENS_A_SECOND);
    let (kib, micros) = (measured.relay_kib, measured.relay_micros);
    vec![
        step("streams of a relay", format!("{} ÷ {} relays", whole(all), whole(relays)), whole(each)),
        step("its memory for them", format!("× {kib:.1} KiB"), gib(each * kib)),
        step(
            "its tokens",
            format!("× {TOKENS_A_SECOND} a second; × {micros:.1} µs of processor time"),
            format!("{} a second, {:.1} cores", whole(tokens), tokens * micros / 1e6),
        ),
    ]
}

fn queue(report: &Report, relays: f64) -> Vec<Step> {
    let Some(measured) = &report.queue else { return Vec::new() };
    let all = f64::from(measured.count) * TIMES;
    let each = all / relays;
    vec![
        step("waiting requests of a relay", format!("{} ÷ {} relays", whole(all), whole(relays)), whole(each)),
        step("its memory for them", format!("× {:.1} KiB", measured.kib), gib(each * measured.kib)),
    ]
}

fn gib(kib: f64) -> String {
    format!("{:.2} GiB", kib / KIB_A_GIB)
}

/// Formats a number with a comma between thousands.
pub(super) fn whole(value: f64) -> String {
    let digits = format!("{value:.0}");
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at) % 3 == 0 {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scale::tables::tests::report;

    #[test]
    fn million_workers_need_forty_relays() {
        let steps = arithmetic(&report());
        let of = |what: &str| steps.iter().find(|step| step.what == what).map(|step| step.result.as_str());
        assert_eq!(of("relays"), Some("40"));
        assert_eq!(of("a relay's links to workers"), Some("50,000"));
        // 50,000 × 8 KiB, and 50,000 ÷ 15 × 60 µs.
        assert_eq!(of("its memory for them"), Some("0.38 GiB"));
        assert_eq!(of("its heartbeats"), Some("3,333 a second, 20 % of a core"));
        assert_eq!(of("heartbeats of all relays"), Some("133,333 a second"));
        // 50,000 × 200 µs; 10,000 came back in 4 s.
        assert_eq!(of("handshakes after its restart"), Some("10 s of a core"));
        assert_eq!(of("until all of them are back"), Some("20 s"));
        assert_eq!(of("streams of a relay"), Some("12,500"));
        assert_eq!(of("its tokens"), Some("250,000 a second, 2.5 cores"));
    }

    #[test]
    fn unmeasured_figures_are_left_out_of_arithmetic() {
        assert_eq!(arithmetic(&Report { workers: None, ..report() }), []);
        let without = arithmetic(&Report { queue: None, streams: Vec::new(), ..report() });
        assert_eq!(without.len(), 7);
    }

    #[test]
    fn thousands_are_separated_by_commas() {
        assert_eq!([7.0, 999.0, 1000.0, 1_234_567.0].map(whole), ["7", "999", "1,000", "1,234,567"]);
    }
}
