//! Responses of the admin API as tables.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::{Duration, SystemTime};

use modelrelay_protocol::names::marked;
use serde_json::Value;

use super::list;

/// The separator of columns.
const GAP: &str = "   ";
/// The most characters of a cell that contains a list.
const MAX_CELL: usize = 48;

/// The relay, its providers and their problems.
pub(super) fn status(state: &Value, stats: &Value) -> String {
    let up = Duration::from_secs_f64(stats["uptime_secs"].as_f64().unwrap_or_default());
    let mut text =
        format!("relay {} is {}, up for {}\n\n", word(&state["version"]), word(&state["phase"]), rounded(up));
    let rows = list(state, "providers").iter().map(|provider| {
        let sum =
            |field: &str| list(provider, "workers").iter().filter_map(|worker| worker[field].as_u64()).sum::<u64>();
        let ttft = |quantile: &str| millis(&stats["providers"][word(&provider["name"])]["ttft_ms"][quantile]);
        vec![
            word(&provider["name"]),
            if provider["enabled"] == false {
                "disabled".to_owned()
            } else {
                list(provider, "workers").len().to_string()
            },
            format!("{}/{}", sum("load"), sum("max_concurrent")),
            word(&provider["queue_depth"]),
            millis(&provider["oldest_ms"]),
            word(&provider["in_flight"]),
            ttft("p50"),
            ttft("p95"),
        ]
    });
    let names = ["PROVIDER", "WORKERS", "BUSY", "QUEUE", "OLDEST", "IN FLIGHT", "TTFT P50", "P95"];
    text.push_str(&table(&names, rows));
    text.push_str(&zones(state));
    let problems = problems(state);
    if !problems.is_empty() {
        text.push_str("\nProblems:\n");
    }
    for problem in problems {
        // Writing into a string cannot fail.
        let _ = writeln!(text, "- {problem}");
    }
    text
}

/// The workers of each zone, if any worker has a zone or cluster.
fn zones(state: &Value) -> String {
    let mut sums: BTreeMap<[String; 3], [u64; 4]> = BTreeMap::new();
    for provider in list(state, "providers") {
        for worker in list(provider, "workers").iter().filter(|worker| has_location(worker)) {
            let key = [word(&provider["name"]), word(&worker["cluster"]), word(&worker["zone"])];
            let number = |field: &str| worker[field].as_u64().unwrap_or(0);
            let sum = sums.entry(key).or_default();
            let more = [1, number("load"), number("max_concurrent"), number("in_flight_count")];
            sum.iter_mut().zip(more).for_each(|(sum, more)| *sum += more);
        }
    }
    if sums.is_empty() {
        return String::new();
    }
    let rows = sums.into_iter().map(|([provider, cluster, zone], [workers, load, most, in_flight])| {
        vec![provider, cluster, zone, workers.to_string(), format!("{load}/{most}"), in_flight.to_string()]
    });
    format!("\n{}", table(&["PROVIDER", "CLUSTER", "ZONE", "WORKERS", "BUSY", "IN FLIGHT"], rows))
}

fn has_location(worker: &Value) -> bool {
    worker["zone"].is_string() || worker["cluster"].is_string()
}

fn problems(state: &Value) -> Vec<String> {
    let mut problems = Vec::new();
    if let Some(why) = state["config_error"].as_str() {
        problems.push(format!("invalid configuration file, previous configuration is active: {why}"));
    }
    if let Some(why) = state["api_keys_error"].as_str() {
        problems.push(format!("API keys: {why}"));
    }
    if let Some(why) = state["client_tokens_error"].as_str() {
        problems.push(format!("tokens of tenants: {why}"));
    }
    for provider in list(state, "providers") {
        for model in list(provider, "models").iter().filter(|model| model["waiting"].as_u64() > Some(0)) {
            let (waiting, id) = (word(&model["waiting"]), word(&model["id"]));
            match (model["workers"].as_u64(), model["open_workers"].as_u64()) {
                (Some(0), _) => problems.push(format!("{waiting} waiting for {id}: no worker serves it")),
                (_, Some(0)) => problems.push(format!("{waiting} waiting for {id}: no worker has it loaded")),
                _ => {}
            }
        }
    }
    problems
}

/// `/admin/workers`.
pub(super) fn workers(answer: &Value) -> String {
    let has_zones = list(answer, "workers").iter().any(has_location);
    let rows = list(answer, "workers").iter().map(|worker| {
        let state = if worker["is_draining"] == true {
            "draining"
        } else if !list(worker, "failing_models").is_empty() {
            "failing"
        } else if worker["load"].as_u64().unwrap_or(0) == 0 {
            "idle"
        } else {
            "busy"
        };
        let models: Vec<_> = list(worker, "models").iter().filter_map(Value::as_str).collect();
        let mut row = vec![
            word(&worker["worker_name"]),
            word(&worker["provider"]),
            state.to_owned(),
            format!("{}/{}", word(&worker["load"]), word(&worker["max_concurrent"])),
            cut(&models.join(", ")),
            size(&worker["backlog_bytes"]),
            percent(&worker["cache_trust"]),
            percent(&worker["cache_hit_rate"]),
            since(&worker["connected_at"]),
            word(&worker["address"]),
            word(&worker["version"]),
            word(&worker["worker_id"]),
        ];
        if has_zones {
            row.splice(2..2, [word(&worker["cluster"]), word(&worker["zone"])]);
        }
        row
    });
    let mut names = vec![
        "WORKER", "PROVIDER", "STATE", "BUSY", "MODELS", "BACKLOG", "TRUST", "HITS", "UP", "ADDRESS", "VERSION", "ID",
    ];
    if has_zones {
        names.splice(2..2, ["CLUSTER", "ZONE"]);
    }
    table(&names, rows)
}

/// `/admin/requests`.
pub(super) fn requests(answer: &Value) -> String {
    let rows = list(answer, "requests").iter().map(|request| {
        vec![
            word(&request["request_id"]),
            word(&request["provider"]),
            cut(&word(&request["model"])),
            word(&request["state"]),
            word(&request["position"]),
            millis(&request["age_ms"]),
            word(&request["worker"]),
            word(&request["placement"]),
            word(&request["attempts"]),
        ]
    });
    table(&["REQUEST", "PROVIDER", "MODEL", "STATE", "PLACE", "AGE", "WORKER", "PLACEMENT", "SENT"], rows)
}

/// `/admin/keys`: keys and tenants.
pub(super) fn keys(answer: &Value) -> String {
    let rows = list(answer, "keys").iter().chain(list(answer, "tenants")).map(|key| {
        let state = if !key["namespace"].is_null() {
            "tenant"
        } else if key["revoked"] == true {
            "revoked"
        } else if passed_since(&key["expires_at"]).is_some() {
            "expired"
        } else {
            "good"
        };
        let most = key["max_in_flight"].as_u64().map(|most| format!("/{most}")).unwrap_or_default();
        vec![
            word(&key["id"]),
            cut(&word(&key["name"])),
            state.to_owned(),
            since(&key["last_used"]),
            format!("{}{most}", word(&key["in_flight"])),
            key["max_queue_percent"].as_u64().map_or_else(|| "-".to_owned(), |percent| format!("{percent} %")),
            token_limits(key),
            word(&key["class"]),
            word(&key["weight"]),
            word(&key["expires_at"]),
        ]
    });
    table(&["KEY", "NAME", "STATE", "LAST USED", "IN FLIGHT", "QUEUE", "TOKENS", "CLASS", "WEIGHT", "EXPIRES"], rows)
}

fn token_limits(key: &Value) -> String {
    let limits = [("minute", &key["tokens_per_minute"]), ("day", &key["tokens_per_day"])];
    let limits = limits.iter().filter_map(|(period, limit)| Some(format!("{}/{period}", limit.as_u64()?)));
    let limits: Vec<_> = limits.collect();
    if limits.is_empty() { "-".to_owned() } else { limits.join(" ") }
}

pub(super) fn table(names: &[&str], rows: impl Iterator<Item = Vec<String>>) -> String {
    let rows: Vec<_> = rows.collect();
    let width = |column: usize| {
        let cells = rows.iter().map(|row| row[column].chars().count());
        cells.chain([names[column].len()]).max().unwrap_or_default()
    };
    let widths: Vec<usize> = (0..names.len()).map(width).collect();
    let head: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
    let line = |row: &Vec<String>| {
        let cells: Vec<_> = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
        format!("{}\n", cells.join(GAP).trim_end())
    };
    [&head].into_iter().chain(&rows).map(line).collect()
}

/// Formats a value; null becomes a dash. Control characters are replaced, because names come from other machines and
/// must not control the terminal.
pub(super) fn word(value: &Value) -> String {
    match value {
        Value::String(text) => marked(text),
        Value::Null => "-".to_owned(),
        Value::Bool(_) | Value::Number(_) | Value::Array(_) | Value::Object(_) => value.to_string(),
    }
}

pub(super) fn cut(text: &str) -> String {
    if text.chars().count() <= MAX_CELL {
        return word(&text.into());
    }
    word(&format!("{} …", text.chars().take(MAX_CELL - 2).collect::<String>()).into())
}

/// Formats a number of bytes.
fn size(value: &Value) -> String {
    match value.as_u64() {
        Some(bytes @ 0..1024) => format!("{bytes} B"),
        Some(bytes @ 1024..0x10_0000) => format!("{} KiB", bytes >> 10),
        Some(bytes) => format!("{} MiB", bytes >> 20),
        None => "-".to_owned(),
    }
}

/// Formats a share of 1.
fn percent(value: &Value) -> String {
    value.as_f64().map_or_else(|| "-".to_owned(), |share| format!("{:.0} %", share * 100.0))
}

fn millis(value: &Value) -> String {
    match value.as_f64() {
        Some(millis) if millis < 1000.0 => format!("{millis:.0} ms"),
        Some(millis) => rounded(Duration::from_secs_f64(millis / 1000.0)),
        None => "-".to_owned(),
    }
}

fn since(value: &Value) -> String {
    passed_since(value).map_or_else(|| "-".to_owned(), rounded)
}

/// The time since a time in the past.
fn passed_since(value: &Value) -> Option<Duration> {
    let at = value.as_str().and_then(|time| humantime::parse_rfc3339(time).ok());
    at.and_then(|at| SystemTime::now().duration_since(at).ok())
}

/// Rounds down to the two largest units.
pub(super) fn rounded(duration: Duration) -> String {
    let seconds = duration.as_secs();
    let whole = match seconds {
        0..3600 => Duration::from_secs(seconds),
        3600..86_400 => Duration::from_secs(seconds / 60 * 60),
        _ => Duration::from_secs(seconds / 3600 * 3600),
    };
    humantime::format_duration(whole).to_string()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let rows = vec![vec!["a".to_owned(), "1".to_owned()], vec!["longer".to_owned(), "2".to_owned()]];
        assert_eq!(table(&["NAME", "N"], rows.into_iter()), "NAME     N\na        1\nlonger   2\n");
    }

    #[test]
    fn times_are_shown_in_two_units() {
        let text = |secs| rounded(Duration::from_secs(secs));
        assert_eq!([text(0), text(61), text(3661), text(90_061)], ["0s", "1m 1s", "1h 1m", "1day 1h"]);
        assert_eq!([millis(&json!(12.4)), millis(&json!(61_000)), millis(&json!(null))], ["12 ms", "1m 1s", "-"]);
    }

    #[test]
    fn request_shows_why_its_worker_was_chosen() {
        let text = requests(&json!({"requests": [{"request_id": "a", "placement": "moved: busy", "attempts": 1}]}));
        assert!(text.contains("PLACEMENT") && text.contains("moved: busy"), "{text}");
    }

    #[test]
    fn worker_shows_backlog_trust_and_hits() {
        let worker = |backlog| json!({"worker_name": "gpu", "backlog_bytes": backlog, "cache_trust": 0.875, "cache_hit_rate": 0.42});
        let text = workers(&json!({"workers": [worker(512), worker(3 << 10), worker(5 << 20)]}));
        for expected in ["512 B", "3 KiB", "5 MiB", "88 %", "42 %"] {
            assert!(text.contains(expected), "{text}");
        }
    }

    #[test]
    fn control_characters_in_names_are_replaced() {
        assert_eq!(word(&json!("a\u{1b}[2Jb\n")), "a\u{fffd}[2Jb\u{fffd}");
    }

    #[test]
    fn worker_with_failing_model_is_failing() {
        let worker = json!({"worker_name": "gpu", "load": 0, "models": ["a", "b"], "failing_models": ["b"]});
        assert!(workers(&json!({"workers": [worker]})).contains("failing"));
        let worker = json!({"worker_name": "gpu", "load": 0, "models": ["a"], "failing_models": []});
        assert!(workers(&json!({"workers": [worker]})).contains("idle"));
    }

    #[test]
    fn key_shows_state_and_limits() {
        let text = keys(&json!({"keys": [
            {"id": "a", "in_flight": 3, "max_in_flight": 40, "max_queue_percent": 25, "tokens_per_minute": 5000, "tokens_per_day": 90000, "class": "batch", "weight": 2.5, "expires_at": "2999-01-01T00:00:00Z"},
            {"id": "b", "in_flight": 0, "expires_at": "2000-01-01T00:00:00Z"},
            {"id": "c", "in_flight": 0, "expires_at": "2000-01-01T00:00:00Z", "revoked": true},
        ], "tenants": [{"id": "sa:apps/chat", "name": "web", "namespace": "apps", "in_flight": 7, "max_in_flight": 8}]}));
        for expected in [
            "sa:apps/chat   web    tenant",
            "7/8",
            "good",
            "3/40",
            "25 %",
            "5000/minute 90000/day",
            "batch",
            "2.5",
            "2999-01-01T00:00:00Z",
            "expired",
            "revoked",
        ] {
            assert!(text.contains(expected), "{text}");
        }
    }

    #[test]
    fn requests_waiting_without_worker_are_reported_as_problem() {
        let model = |id: &str, waiting: u32, workers: u32, open: u32| json!({"id": id, "waiting": waiting, "workers": workers, "open_workers": open});
        let models = [model("a", 2, 0, 0), model("b", 1, 3, 0), model("c", 9, 1, 1), model("d", 0, 0, 0)];
        let state = json!({"config_error": "line 3", "client_tokens_error": "403", "providers": [{"name": "p", "models": models}]});
        let problems = problems(&state);
        assert_eq!(problems[0], "invalid configuration file, previous configuration is active: line 3");
        assert_eq!(problems[1], "tokens of tenants: 403");
        assert_eq!(problems[2..], ["2 waiting for a: no worker serves it", "1 waiting for b: no worker has it loaded"]);
    }
}
