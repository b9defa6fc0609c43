use std::time::{Duration, Instant};

use modelrelay_protocol::message::{Slot, SlotModel};
use prometheus::TextEncoder;

use super::*;
use crate::effect::SwapResult;
use crate::error::SlotError;
use crate::machine::Requests;

/// Metrics, and their page.
struct Page {
    registry: Registry,
    metrics: MultiplexerMetrics,
}

impl Page {
    fn new() -> Self {
        let registry = Registry::new();
        Self { metrics: MultiplexerMetrics::new(&registry), registry }
    }

    /// Returns every sample that is not 0, without the buckets of histograms.
    fn samples(&self) -> Vec<String> {
        let text = TextEncoder::new().encode_to_string(&self.registry.gather()).unwrap();
        let is_sample = |line: &&str| !line.starts_with('#') && !line.contains("_bucket{") && !line.ends_with(" 0");
        text.lines().filter(is_sample).map(|line| line.replace("modelrelay_worker_", "")).collect()
    }
}

#[test]
fn each_slot_event_updates_its_own_metrics() {
    let (model, two) = (|| "a".into(), Duration::from_secs(2));
    let swap = Swap {
        from: Some(model()),
        to: None,
        reason: Reason::Ttl,
        drain: Duration::from_secs(1),
        evict: Duration::ZERO,
        load: two,
        severed: 3,
        result: SwapResult::LoadFailed,
    };
    let cases: [(SlotEvent, &[&str]); 10] = [
        (
            SlotEvent::SwapEnded(swap),
            &[
                "severed_total 3",
                r#"swap_phase_seconds_sum{phase="drain"} 1"#,
                r#"swap_phase_seconds_count{phase="drain"} 1"#,
                r#"swap_phase_seconds_count{phase="evict"} 1"#,
                r#"swap_phase_seconds_sum{phase="load"} 2"#,
                r#"swap_phase_seconds_count{phase="load"} 1"#,
                r#"swaps_total{from="a",reason="ttl",result="load_failed",to="none"} 1"#,
            ],
        ),
        (SlotEvent::SwapAborted { from: model() }, &["swaps_aborted_total 1"]),
        (
            SlotEvent::Held { model: model(), waited: two },
            &[r#"hold_seconds_sum{model="a"} 2"#, r#"hold_seconds_count{model="a"} 1"#],
        ),
        (SlotEvent::Coalesced { model: model() }, &["coalesced_total 1"]),
        (SlotEvent::LingerHit { model: model() }, &["linger_hits_total 1"]),
        (SlotEvent::LingerMiss { model: model() }, &["linger_misses_total 1"]),
        (
            SlotEvent::LoadFailed { model: model(), error: SlotError::Draining },
            &[r#"load_failures_total{model="a"} 1"#],
        ),
        (SlotEvent::MemoryNotFreed { model: model() }, &["memory_not_freed_total 1"]),
        (
            SlotEvent::ResidencyEnded { model: model(), lasted: two },
            &[r#"residency_seconds_sum{model="a"} 2"#, r#"residency_seconds_count{model="a"} 1"#],
        ),
        (SlotEvent::Quarantined { model: model() }, &[]),
    ];
    for (news, expected) in cases {
        let page = Page::new();
        page.metrics.note(&news);
        assert_eq!(page.samples(), expected, "{news:?}");
    }
}

/// A slot with one model.
fn report(id: &str, state: SlotState, resident: Option<&str>, model: &str, requests: Requests) -> Report {
    let described = SlotModel { id: model.to_owned(), swap_cost_ms: 1500, ..SlotModel::default() };
    let slot = Slot {
        id: id.to_owned(),
        state,
        resident: resident.map(str::to_owned),
        models: vec![described],
        ..Slot::default()
    };
    let shares =
        Shares { serving: Duration::from_secs(2), swapping: Duration::from_secs(1), idle: Duration::from_secs(5) };
    Report {
        slot,
        drain: None,
        at: Instant::now(),
        last_swap: None,
        failures: Vec::new(),
        requests: vec![(model.into(), requests)],
        shares,
    }
}

const SHARES_OF_GPU0: [&str; 3] = [
    r#"gpu_time_share{activity="idle",slot="gpu0"} 0.625"#,
    r#"gpu_time_share{activity="serving",slot="gpu0"} 0.25"#,
    r#"gpu_time_share{activity="swapping",slot="gpu0"} 0.125"#,
];

#[test]
fn gauges_show_slots_and_drop_removed_ones() {
    let page = Page::new();
    let some = Requests { held: 9, waiting: 2, leases: 3 };
    page.metrics.observe(&[report("gpu0", SlotState::Ready, Some("a"), "a", some)]);
    let (state, rest) = (r#"slot_state{slot="gpu0",state="ready"} 1"#, SHARES_OF_GPU0);
    let with_a = [
        rest[0],
        rest[1],
        rest[2],
        r#"leases{model="a"} 3"#,
        r#"resident_info{model="a",slot="gpu0"} 1"#,
        state,
        r#"swap_cost_ema_seconds{model="a"} 1.5"#,
        r#"waiting{model="a"} 2"#,
    ];
    assert_eq!(page.samples(), with_a);
    page.metrics.observe(&[report("gpu0", SlotState::Empty, None, "b", Requests::default())]);
    let with_b = [
        rest[0],
        rest[1],
        rest[2],
        r#"slot_state{slot="gpu0",state="empty"} 1"#,
        r#"swap_cost_ema_seconds{model="b"} 1.5"#,
    ];
    assert_eq!(page.samples(), with_b);
    let text = TextEncoder::new().encode_to_string(&page.registry.gather()).unwrap();
    assert!(!text.contains(r#"model="a""#), "{text}");
}

#[test]
fn requests_for_model_in_two_slots_are_summed() {
    let page = Page::new();
    let of = |leases, waiting| Requests { held: 0, waiting, leases };
    let slots = [("gpu0", of(1, 4)), ("gpu1", of(2, 8))];
    page.metrics.observe(&slots.map(|(id, requests)| report(id, SlotState::Ready, Some("a"), "a", requests)));
    let of_models: Vec<_> = page.samples().into_iter().filter(|sample| sample.contains(r#"{model="a"}"#)).collect();
    assert_eq!(
        of_models,
        [r#"leases{model="a"} 3"#, r#"swap_cost_ema_seconds{model="a"} 1.5"#, r#"waiting{model="a"} 12"#]
    );
}

#[test]
fn time_shares_are_absent_before_any_time() {
    let page = Page::new();
    let mut new = report("gpu0", SlotState::Empty, None, "a", Requests::default());
    new.shares = Shares::default();
    page.metrics.observe(&[new]);
    assert!(page.samples().iter().all(|sample| !sample.contains("NaN") && !sample.contains("gpu_time_share")));
}
